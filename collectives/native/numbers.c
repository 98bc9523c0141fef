/* Numbers: the numbers of a node's ranks, of memory/counters.py: this rank's grows, and it waits for the others'. */

#include "native.h"
#include <sched.h>

static inline int64_t seen(const Py_buffer *number)
{
    return __atomic_load_n((const int64_t *)number->buf, __ATOMIC_ACQUIRE);
}

static inline void pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

int advance_number(Numbers *n, int64_t number)
{
    const int64_t *asleep = n->asleep.buf;
    __atomic_store_n((int64_t *)n->own.buf, number, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* who goes to sleep after the look below sees the number before it */
    for (Py_ssize_t i = 0; i < n->asleep.len / (Py_ssize_t)sizeof(int64_t); i++) {
        if (__atomic_load_n(&asleep[i], __ATOMIC_RELAXED) != 0) {
            PyObject *woken = PyObject_CallNoArgs(n->wake);
            Py_XDECREF(woken);
            return woken == NULL ? -1 : 0;
        }
    }
    return 0;
}

/* The first rank from that place on whose number is below `target`; the number of ranks where there is none. */
static Py_ssize_t behind(const Numbers *n, Py_ssize_t from, int64_t target)
{
    while (from < n->count && seen(&n->others[from]) >= target)
        from++;
    return from;
}

static int all_there(Numbers *n, int64_t target)
{
    Py_ssize_t waited = behind(n, 0, target);
    if (waited == n->count || is_in_background())
        return waited == n->count;
    Py_BEGIN_ALLOW_THREADS
    for (int look = 0; look < n->looks && waited < n->count; look++) {
        pause_core();
        waited = behind(n, waited, target);
    }
    for (int turn = 0; turn < n->yields && waited < n->count; turn++) {
        sched_yield();
        waited = behind(n, waited, target);
    }
    Py_END_ALLOW_THREADS
    return waited == n->count;
}

PyObject *wait_for_all(Numbers *n, int64_t target, PyObject *has_moved_on)
{
    if (all_there(n, target))
        return Py_NewRef(Py_True);
    return PyObject_CallFunction(n->patiently, "LO", (long long)target, has_moved_on);
}

static PyObject *method_advance(PyObject *self, PyObject *number)
{
    int64_t value = PyLong_AsLongLong(number);
    if ((value == -1 && PyErr_Occurred()) || advance_number((Numbers *)self, value) < 0)
        return NULL;
    return Py_NewRef(Py_None);
}

static PyObject *method_wait(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    if (count < 1 || count + named > 2)
        return PyErr_Format(PyExc_TypeError, "wait_for_all takes target and has_moved_on");
    int64_t target = PyLong_AsLongLong(arguments[0]);
    if (target == -1 && PyErr_Occurred())
        return NULL;
    return wait_for_all((Numbers *)self, target, count + named == 2 ? arguments[1] : Py_None);
}

static PyMethodDef methods[] = {
    {"advance", method_advance, METH_O, "Counters.advance"},
    {"wait_for_all", (PyCFunction)(void (*)(void))method_wait, METH_FASTCALL | METH_KEYWORDS, "Counters.wait_for_all"},
    {NULL, NULL, 0, NULL},
};

static int clear(Numbers *n)
{
    PyBuffer_Release(&n->own);
    PyBuffer_Release(&n->asleep);
    for (Py_ssize_t i = 0; i < n->count; i++)
        PyBuffer_Release(&n->others[i]);
    Py_CLEAR(n->wake);
    Py_CLEAR(n->patiently);
    return 0;
}

static int traverse(Numbers *n, visitproc visit, void *arg)
{
    Py_VISIT(n->wake);
    Py_VISIT(n->patiently);
    return 0;
}

static void dealloc(Numbers *n)
{
    PyObject_GC_UnTrack(n);
    clear(n);
    PyMem_Free(n->others);
    Py_TYPE(n)->tp_free(n);
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    static char *keywords[] = {"own", "others", "asleep", "wake", "looks", "yields", "patiently", NULL};
    PyObject *own, *others, *asleep, *wake, *patiently;
    int looks, yields;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OO!OOiiO", keywords, &own, &PyTuple_Type, &others, &asleep, &wake,
                                     &looks, &yields, &patiently))
        return NULL;
    Numbers *n = (Numbers *)type->tp_alloc(type, 0);
    if (n == NULL)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(others);
    n->wake = Py_NewRef(wake), n->patiently = Py_NewRef(patiently);
    n->looks = looks, n->yields = yields;
    n->others = PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    int failed = n->others == NULL || PyObject_GetBuffer(own, &n->own, PyBUF_WRITABLE) < 0 ||
                 PyObject_GetBuffer(asleep, &n->asleep, PyBUF_SIMPLE) < 0;
    while (!failed && n->count < count) {
        failed = PyObject_GetBuffer(PyTuple_GET_ITEM(others, n->count), &n->others[n->count], PyBUF_SIMPLE) < 0;
        n->count += !failed;
    }
    if (failed) {
        Py_DECREF(n);
        return NULL;
    }
    return (PyObject *)n;
}

PyTypeObject NumbersType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "collectives.native.Numbers",
    .tp_doc = "The numbers of a node's ranks; see numbers.c.",
    .tp_basicsize = sizeof(Numbers),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_methods = methods,
    .tp_new = make,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)dealloc,
};
