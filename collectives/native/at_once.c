/* AtOnce: issues a prepared operation and returns when it has run; group/issue.py:Issuer.prepare says how. */

#include "native.h"

enum { CODE = 1, STATE }; /* words of a rank's row of runtime/positions.py, behind its number */
enum { AFTER, INSIDE };

typedef struct {
    PyObject_HEAD
    vectorcallfunc run;
    Py_buffer row, words;
    int64_t code;
    Numbers *numbers;
    int waits; /* for all ranks, before the operation */
    PyObject *detail, *queue, *take_turn, *end_turn, *profiler, *refusal, *issuer;
    PyObject *task, *otherwise, *fail;
} AtOnce;

static PyObject *name_enabled, *name_why, *name_exempt, *name_issued;

static int is_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL)
        return -1;
    int found = value == Py_False ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return found;
}

/* True if a profiler is on, the group cannot be used, or the watchdog is to take no notice; -1 for an error. */
static int is_unusual(AtOnce *a)
{
    PyObject *enabled = PyDict_GetItemWithError(a->profiler, name_enabled);
    if (enabled != Py_False)
        return PyErr_Occurred() ? -1 : 1;
    int refused = is_true(a->refusal, name_why);
    return refused ? refused : is_true(a->issuer, name_exempt);
}

/* The number of the operation that is issued now; -1 for an error. */
static int64_t next_number(AtOnce *a)
{
    PyObject *issued = PyObject_GetAttr(a->issuer, name_issued);
    if (issued == NULL)
        return -1;
    int64_t number = PyLong_AsLongLong(issued) + 1;
    Py_DECREF(issued);
    PyObject *next = PyLong_FromLongLong(number);
    int set = next == NULL ? -1 : PyObject_SetAttr(a->issuer, name_issued, next);
    Py_XDECREF(next);
    return set < 0 ? -1 : number;
}

/* Shows that this rank is in the operation. */
static int enter(AtOnce *a, int64_t number)
{
    int64_t *row = a->row.buf;
    row[CODE] = a->code;
    memcpy(a->words.buf, PyBytes_AS_STRING(a->detail), (size_t)a->words.len);
    if (advance_number(a->numbers, number) < 0)
        return -1;
    __atomic_store_n(&row[STATE], INSIDE, __ATOMIC_RELAXED);
    return 0;
}

/* Calls issuer._raise for the error that is set, which sets the one that the program is told. */
static void fail(AtOnce *a, int64_t number, PyObject *arrays)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *none = PyObject_CallFunction(a->fail, "OLO", error, (long long)number, arrays);
    Py_XDECREF(none);
    if (none != NULL)
        PyErr_SetObject(type, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

static PyObject *run_in_turn(AtOnce *a, PyObject *arrays)
{
    int64_t number = next_number(a);
    if (number < 0)
        return NULL;
    int entered = enter(a, number);
    PyObject *done = entered < 0 ? NULL : Py_NewRef(Py_None);
    if (done != NULL && a->waits)
        Py_SETREF(done, wait_for_all(a->numbers, number, Py_None));
    if (done != NULL)
        Py_SETREF(done, PyObject_CallNoArgs(a->task));
    if (done == NULL) {
        fail(a, number, arrays);
        return NULL;
    }
    Py_DECREF(done);
    __atomic_store_n(&((int64_t *)a->row.buf)[STATE], AFTER, __ATOMIC_RELAXED);
    return Py_NewRef(Py_None);
}

static PyObject *run(PyObject *self, PyObject *const *arguments, size_t count, PyObject *names)
{
    AtOnce *a = (AtOnce *)self;
    if (PyVectorcall_NARGS(count) != 1 || names != NULL)
        return PyErr_Format(PyExc_TypeError, "AtOnce takes the arrays that it keeps alive");
    PyObject *arrays = arguments[0];
    Py_ssize_t queued = PyObject_Size(a->queue);
    if (queued < 0)
        return NULL;
    if (queued)
        return PyObject_CallOneArg(a->otherwise, arrays);
    PyObject *taken = PyObject_CallOneArg(a->take_turn, Py_False);
    if (taken == NULL)
        return NULL;
    Py_DECREF(taken);
    if (taken != Py_True) /* a compound operation has the turn while its parts run */
        return PyObject_CallOneArg(a->otherwise, arrays);
    /* After the turn is taken, so that what an operation in the background has just done is seen. */
    int unusual = is_unusual(a);
    PyObject *done = unusual == 0 ? run_in_turn(a, arrays) : NULL;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *ended = PyObject_CallNoArgs(a->end_turn);
    Py_XDECREF(ended);
    if (ended != NULL)
        PyErr_Restore(type, error, trace);
    return unusual > 0 ? PyObject_CallOneArg(a->otherwise, arrays) : done;
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    static char *keywords[] = {"row",      "words",  "code", "numbers", "waits",     "detail", "queue",
                               "take_turn", "end_turn", "profiler", "refusal", "issuer", "task", "otherwise", "fail", NULL};
    PyObject *row, *words, *numbers, *detail, *queue, *take_turn, *end_turn, *profiler, *refusal, *issuer;
    PyObject *task, *otherwise, *fail;
    long long code;
    int waits;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOLO!pO!OOOO!OOOOO", keywords, &row, &words, &code, &NumbersType,
                                     &numbers, &waits, &PyBytes_Type, &detail, &queue, &take_turn, &end_turn,
                                     &PyDict_Type, &profiler, &refusal, &issuer, &task, &otherwise, &fail))
        return NULL;
    AtOnce *a = (AtOnce *)type->tp_alloc(type, 0);
    if (a == NULL)
        return NULL;
    a->run = run, a->code = code, a->waits = waits;
    a->numbers = (Numbers *)Py_NewRef(numbers), a->detail = Py_NewRef(detail), a->queue = Py_NewRef(queue);
    a->take_turn = Py_NewRef(take_turn), a->end_turn = Py_NewRef(end_turn), a->profiler = Py_NewRef(profiler);
    a->refusal = Py_NewRef(refusal), a->issuer = Py_NewRef(issuer), a->task = Py_NewRef(task);
    a->otherwise = Py_NewRef(otherwise), a->fail = Py_NewRef(fail);
    int failed = PyObject_GetBuffer(row, &a->row, PyBUF_WRITABLE) < 0 ||
                 PyObject_GetBuffer(words, &a->words, PyBUF_WRITABLE) < 0;
    if (!failed && (a->row.len < 3 * (Py_ssize_t)sizeof(int64_t) || PyBytes_GET_SIZE(detail) != a->words.len)) {
        PyErr_SetString(PyExc_ValueError, "row, detail: got other lengths than positions have");
        failed = 1;
    }
    if (failed) {
        Py_DECREF(a);
        return NULL;
    }
    return (PyObject *)a;
}

static int traverse(AtOnce *a, visitproc visit, void *arg)
{
    PyObject *held[] = {(PyObject *)a->numbers, a->queue, a->take_turn, a->end_turn, a->profiler, a->refusal,
                        a->issuer, a->task, a->otherwise, a->fail};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        Py_VISIT(held[i]);
    return 0;
}

static int clear(AtOnce *a)
{
    PyBuffer_Release(&a->row);
    PyBuffer_Release(&a->words);
    Py_CLEAR(a->numbers);
    Py_CLEAR(a->detail);
    Py_CLEAR(a->queue);
    Py_CLEAR(a->take_turn);
    Py_CLEAR(a->end_turn);
    Py_CLEAR(a->profiler);
    Py_CLEAR(a->refusal);
    Py_CLEAR(a->issuer);
    Py_CLEAR(a->task);
    Py_CLEAR(a->otherwise);
    Py_CLEAR(a->fail);
    return 0;
}

static void dealloc(AtOnce *a)
{
    PyObject_GC_UnTrack(a);
    clear(a);
    Py_TYPE(a)->tp_free(a);
}

PyTypeObject AtOnceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "collectives.native.AtOnce",
    .tp_doc = "Issues a prepared operation, and returns when it has run; see at_once.c.",
    .tp_basicsize = sizeof(AtOnce),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(AtOnce, run),
    .tp_call = PyVectorcall_Call,
    .tp_new = make,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)dealloc,
};

int intern_at_once(void)
{
    name_enabled = PyUnicode_InternFromString("_is_profiler_enabled");
    name_why = PyUnicode_InternFromString("why");
    name_exempt = PyUnicode_InternFromString("exempt");
    name_issued = PyUnicode_InternFromString("issued");
    return name_enabled && name_why && name_exempt && name_issued ? 0 : -1;
}
