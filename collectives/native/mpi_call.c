/* MpiCall: a blocking collective of the MPI library, with arguments that are looked up once.

   The library's function is called by its address, with the handles that mpi4py has made: numbers of 32 bits in MPICH
   and Intel MPI, pointers in Open MPI. */

#include "native.h"
#include <math.h>

typedef enum { REDUCTION, MOVEMENT, BROADCAST, ROOTED_REDUCTION, ROOTED_MOVEMENT, BARRIER, SHAPES } Shape;

typedef struct {
    PyObject_HEAD
    vectorcallfunc run;
    void *function;
    Shape shape;
    int pointers;    /* whether handles are */
    int count, count_out, root;
    void *x, *out;   /* what is sent, and where the result comes */
    intptr_t datatype, op, comm;
    int width;       /* bytes of a floating-point number of the result, if something follows in it */
    Py_ssize_t numbers;
    double divisor;
    int unify;       /* whether all NaNs become the same bits */
    PyObject *patiently, *failed, *kept;
} MpiCall;

static _Thread_local int background;

int is_in_background(void)
{
    return background;
}

/* in_background(on): tells that this thread runs operations while the program computes, so that it must not poll. */
PyObject *in_background(PyObject *module, PyObject *on)
{
    int is_on = PyObject_IsTrue(on);
    if (is_on < 0)
        return NULL;
    background = is_on;
    Py_RETURN_NONE;
}

typedef void *Pointer;

#define CALLING(name, Handle)                                                                                          \
    static int name(const MpiCall *c)                                                                                  \
    {                                                                                                                  \
        Handle datatype = (Handle)c->datatype, op = (Handle)c->op, comm = (Handle)c->comm;                             \
        switch (c->shape) {                                                                                            \
        case REDUCTION:                                                                                                \
            return ((int (*)(const void *, void *, int, Handle, Handle, Handle))c->function)(                          \
                c->x, c->out, c->count, datatype, op, comm);                                                           \
        case MOVEMENT:                                                                                                 \
            return ((int (*)(const void *, int, Handle, void *, int, Handle, Handle))c->function)(                     \
                c->x, c->count, datatype, c->out, c->count_out, datatype, comm);                                       \
        case BROADCAST:                                                                                                \
            return ((int (*)(void *, int, Handle, int, Handle))c->function)(c->out, c->count, datatype, c->root, comm); \
        case ROOTED_REDUCTION:                                                                                         \
            return ((int (*)(const void *, void *, int, Handle, Handle, int, Handle))c->function)(                     \
                c->x, c->out, c->count, datatype, op, c->root, comm);                                                  \
        case ROOTED_MOVEMENT:                                                                                          \
            return ((int (*)(const void *, int, Handle, void *, int, Handle, int, Handle))c->function)(                \
                c->x, c->count, datatype, c->out, c->count_out, datatype, c->root, comm);                              \
        default:                                                                                                       \
            return ((int (*)(Handle))c->function)(comm);                                                               \
        }                                                                                                              \
    }

CALLING(by_numbers, int)
CALLING(by_pointers, Pointer)

#define FINISHING(name, Float)                                                                                         \
    static void name(const MpiCall *c)                                                                                 \
    {                                                                                                                  \
        Float *values = c->out, divisor = (Float)c->divisor;                                                           \
        int found = 0;                                                                                                 \
        for (Py_ssize_t i = 0; divisor != 1 && i < c->numbers; i++)                                                    \
            values[i] /= divisor;                                                                                      \
        for (Py_ssize_t i = 0; c->unify && i < c->numbers; i++)                                                        \
            found |= values[i] != values[i];                                                                           \
        for (Py_ssize_t i = 0; found && i < c->numbers; i++)                                                           \
            values[i] = values[i] != values[i] ? (Float)NAN : values[i];                                               \
    }

FINISHING(finish_floats, float)
FINISHING(finish_doubles, double)

static PyObject *run(PyObject *self, PyObject *const *arguments, size_t count, PyObject *names)
{
    const MpiCall *c = (MpiCall *)self;
    if (background)
        return PyObject_CallNoArgs(c->patiently);
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = c->pointers ? by_pointers(c) : by_numbers(c);
    if (status == 0 && c->width == sizeof(float))
        finish_floats(c);
    else if (status == 0 && c->width == sizeof(double))
        finish_doubles(c);
    Py_END_ALLOW_THREADS
    return status == 0 ? Py_NewRef(Py_None) : PyObject_CallFunction(c->failed, "i", status);
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    static char *keywords[] = {"function", "shape", "pointers", "x",       "count",   "out",   "count_out", "datatype", "op",
                               "root",     "comm",  "width",    "numbers", "divisor", "unify", "patiently", "failed",   "kept",
                               NULL};
    unsigned long long function, x, out, datatype, op, comm;
    int shape, pointers, count_in, count_out, root, width, unify;
    Py_ssize_t numbers;
    double divisor;
    PyObject *patiently, *failed, *kept;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "KipKiKiKKiKindpOOO", keywords, &function, &shape, &pointers, &x,
                                     &count_in, &out, &count_out, &datatype, &op, &root, &comm, &width, &numbers,
                                     &divisor, &unify, &patiently, &failed, &kept))
        return NULL;
    if (shape < 0 || shape >= SHAPES)
        return PyErr_Format(PyExc_ValueError, "shape: got %d", shape);
    MpiCall *c = (MpiCall *)type->tp_alloc(type, 0);
    if (c == NULL)
        return NULL;
    c->run = run;
    c->function = (void *)(intptr_t)function;
    c->shape = (Shape)shape;
    c->pointers = pointers;
    c->x = (void *)(intptr_t)x, c->out = (void *)(intptr_t)out;
    c->count = count_in, c->count_out = count_out, c->root = root;
    c->datatype = (intptr_t)datatype, c->op = (intptr_t)op, c->comm = (intptr_t)comm;
    c->width = width, c->numbers = numbers, c->divisor = divisor, c->unify = unify;
    c->patiently = Py_NewRef(patiently), c->failed = Py_NewRef(failed), c->kept = Py_NewRef(kept);
    return (PyObject *)c;
}

static int traverse(MpiCall *c, visitproc visit, void *arg)
{
    Py_VISIT(c->patiently);
    Py_VISIT(c->failed);
    Py_VISIT(c->kept);
    return 0;
}

static int clear(MpiCall *c)
{
    Py_CLEAR(c->patiently);
    Py_CLEAR(c->failed);
    Py_CLEAR(c->kept);
    return 0;
}

static void dealloc(MpiCall *c)
{
    PyObject_GC_UnTrack(c);
    clear(c);
    Py_TYPE(c)->tp_free(c);
}

PyTypeObject MpiCallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "collectives.native.MpiCall",
    .tp_doc = "A blocking collective of the MPI library; see mpi_call.c.",
    .tp_basicsize = sizeof(MpiCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(MpiCall, run),
    .tp_call = PyVectorcall_Call,
    .tp_new = make,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)dealloc,
};
