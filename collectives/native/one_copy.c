/* OneCopy: a one-copy collective that is made again on the same arrays: the ranks' meeting, and the steps behind it.

   It calls the Operation of backends/symmetric/operation.py, its twin, for all that it does not know yet:

       slow()        the whole operation, in Python
       go_on(turn)   what follows the meeting of that turn, in Python
       known()       what the Operation has worked out, of which copies and sums are then made from here; or None

   A program that was worked out for one buffer of the scratch is that for the others at other addresses. */

#include "native.h"

enum { CALL, COPY, ADD, MULTIPLY, DIVIDE, MEET }; /* of steps, as in backends/symmetric/steps.py */
enum { TURNS = 2, BUFFERS = 3 };                  /* of meetings, and of the scratch */
enum { LARGE = 16 << 10 };                        /* bytes, above which other threads go on meanwhile */

typedef struct {
    int kind, width;
    Py_ssize_t count;     /* bytes of a copy, else elements */
    void *out;
    const void *a, *b;
    double by;
    PyObject *function, *arguments; /* which the list has */
} Step;

typedef struct {
    PyObject *kept; /* the list that it was made from; NULL where it is not known */
    Step *steps;
    Py_ssize_t count;
} Program;

typedef struct {
    PyObject_HEAD
    vectorcallfunc run;
    PyObject *slow, *go_on, *known;
    Numbers *numbers;
    Py_buffer memory, turn, met, staging;
    Py_ssize_t heads[TURNS], ranges[TURNS], rank, row, heads_size, ranges_size;
    Py_ssize_t scratch_size, stride, buffer_size; /* of the scratch: in all, of a rank's part, of a buffer of it */
    intptr_t scratch;        /* its address; 0 while there is none */
    PyObject *seen;          /* all ranks' rows, of the operation that is known; NULL where none is */
    PyObject *rows[2];       /* this rank's, without and with its first chunk in the scratch */
    PyObject *own_ranges;
    PyObject *memories;      /* a tuple of weak references: of the allocations that the arrays lie in */
    int may_fill, chunks, staged;
    Program filling[BUFFERS], program, staged_program[BUFFERS]; /* before the meeting, and behind it */
} OneCopy;

#define SUM(name, Float)                                                                                               \
    static void name(const Step *s)                                                                                    \
    {                                                                                                                  \
        Float *out = s->out, by = (Float)s->by;                                                                        \
        const Float *a = s->a, *b = s->b;                                                                              \
        Py_ssize_t count = s->count;                                                                                   \
        if (s->kind == ADD) {                                                                                          \
            _Pragma("GCC ivdep") for (Py_ssize_t i = 0; i < count; i++) out[i] = a[i] + b[i];                          \
        } else if (s->kind == MULTIPLY) {                                                                              \
            _Pragma("GCC ivdep") for (Py_ssize_t i = 0; i < count; i++) out[i] = a[i] * by;                            \
        } else {                                                                                                       \
            _Pragma("GCC ivdep") for (Py_ssize_t i = 0; i < count; i++) out[i] = a[i] / by;                            \
        }                                                                                                              \
    }

SUM(sum_floats, float)
SUM(sum_doubles, double)

static void compute(const Step *s)
{
    if (s->kind == COPY)
        memcpy(s->out, s->a, (size_t)s->count);
    else if (s->width == sizeof(float))
        sum_floats(s);
    else
        sum_doubles(s);
}

static int meet(OneCopy *o)
{
    int64_t number = ++*(int64_t *)o->met.buf;
    if (advance_number(o->numbers, number) < 0)
        return -1;
    PyObject *there = wait_for_all(o->numbers, number, Py_None);
    Py_XDECREF(there);
    return there == NULL ? -1 : 0;
}

static int run_program(OneCopy *o, const Program *p)
{
    for (const Step *s = p->steps; s < p->steps + p->count; s++) {
        if (s->kind == MEET) {
            if (meet(o) < 0)
                return -1;
        } else if (s->kind == CALL) {
            PyObject *done = PyObject_CallObject(s->function, s->arguments);
            Py_XDECREF(done);
            if (done == NULL)
                return -1;
        } else if (s->count * (s->width ? s->width : 1) <= LARGE) {
            compute(s);
        } else {
            Py_BEGIN_ALLOW_THREADS
            compute(s);
            Py_END_ALLOW_THREADS
        }
    }
    return 0;
}

static void forget_program(Program *p)
{
    PyMem_Free(p->steps);
    p->steps = NULL, p->count = 0;
    Py_CLEAR(p->kept);
}

static int read_step(Step *s, PyObject *given)
{
    unsigned long long out = 0, a = 0, b = 0;
    int read = 0;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) == 0)
        return -1;
    s->kind = (int)PyLong_AsLong(PyTuple_GET_ITEM(given, 0));
    switch (s->kind) {
    case CALL:
        read = PyArg_ParseTuple(given, "iOO!", &s->kind, &s->function, &PyTuple_Type, &s->arguments);
        break;
    case COPY:
        read = PyArg_ParseTuple(given, "iKKn", &s->kind, &out, &a, &s->count);
        break;
    case ADD:
        read = PyArg_ParseTuple(given, "iiKKKn", &s->kind, &s->width, &out, &a, &b, &s->count);
        break;
    case MULTIPLY:
    case DIVIDE:
        read = PyArg_ParseTuple(given, "iiKKdn", &s->kind, &s->width, &out, &a, &s->by, &s->count);
        break;
    case MEET:
        read = 1;
    }
    s->out = (void *)(intptr_t)out, s->a = (void *)(intptr_t)a, s->b = (void *)(intptr_t)b;
    return read ? 0 : -1;
}

/* Reads a list of steps; nothing is known from None. */
static int read_program(Program *p, PyObject *given)
{
    if (given == Py_None)
        return 0;
    if (!PyList_Check(given))
        return -1;
    p->steps = PyMem_Calloc((size_t)PyList_GET_SIZE(given) + 1, sizeof(Step));
    if (p->steps == NULL)
        return -1;
    p->kept = Py_NewRef(given);
    while (p->count < PyList_GET_SIZE(given)) {
        Step *s = &p->steps[p->count++];
        if (read_step(s, PyList_GET_ITEM(given, p->count - 1)) < 0)
            return -1;
    }
    return 0;
}

/* The address in another buffer of the scratch, so many further; itself where it does not lie in the scratch. */
static void *moved(const OneCopy *o, const void *address, int buffers)
{
    Py_ssize_t place = (intptr_t)address - o->scratch, in_part = o->stride ? place % o->stride : 0;
    if (o->scratch == 0 || place < 0 || place >= o->scratch_size || in_part >= BUFFERS * o->buffer_size)
        return (void *)address;
    Py_ssize_t then = (in_part + buffers * o->buffer_size) % (BUFFERS * o->buffer_size);
    return (void *)(o->scratch + place - in_part + then);
}

/* Makes a program from that for the buffer so many before; none where it calls functions, which have arrays. */
static int move_program(const OneCopy *o, Program *p, const Program *from, int buffers)
{
    for (Py_ssize_t i = 0; i < from->count; i++)
        if (from->steps[i].kind == CALL)
            return 0;
    p->steps = PyMem_Calloc((size_t)from->count + 1, sizeof(Step));
    if (p->steps == NULL)
        return PyErr_NoMemory() == NULL ? -1 : 0;
    p->kept = Py_NewRef(from->kept), p->count = from->count;
    for (Py_ssize_t i = 0; i < p->count; i++) {
        p->steps[i] = from->steps[i];
        p->steps[i].out = moved(o, p->steps[i].out, buffers);
        p->steps[i].a = moved(o, p->steps[i].a, buffers);
        p->steps[i].b = moved(o, p->steps[i].b, buffers);
    }
    return 0;
}

/* Makes the programs for the buffers for which none was worked out from one for which one was. */
static int complete(const OneCopy *o, Program *programs)
{
    int from = 0;
    while (from < BUFFERS && programs[from].kept == NULL)
        from++;
    for (int i = 0; from < BUFFERS && i < BUFFERS; i++)
        if (programs[i].kept == NULL && move_program(o, &programs[i], &programs[from], i + BUFFERS - from) < 0)
            return -1;
    return 0;
}

static void forget(OneCopy *o)
{
    for (int i = 0; i < BUFFERS; i++) {
        forget_program(&o->filling[i]);
        forget_program(&o->staged_program[i]);
    }
    forget_program(&o->program);
    Py_CLEAR(o->seen);
    Py_CLEAR(o->rows[0]);
    Py_CLEAR(o->rows[1]);
    Py_CLEAR(o->own_ranges);
    Py_CLEAR(o->memories);
}

static int learn(OneCopy *o)
{
    forget(o);
    PyObject *known = PyObject_CallNoArgs(o->known), *seen, *filling[BUFFERS], *staged[BUFFERS], *program;
    if (known == NULL || known == Py_None) {
        Py_XDECREF(known);
        return known == NULL ? -1 : 0;
    }
    int failed = !PyArg_ParseTuple(known, "O!O!O!O!O!pip(OOO)(OOO)O(nnnn)", &PyBytes_Type, &seen, &PyBytes_Type, &o->rows[0],
                                   &PyBytes_Type, &o->rows[1], &PyBytes_Type, &o->own_ranges, &PyTuple_Type,
                                   &o->memories, &o->may_fill, &o->chunks, &o->staged, &filling[0], &filling[1],
                                   &filling[2], &staged[0], &staged[1], &staged[2], &program, &o->scratch,
                                   &o->scratch_size, &o->stride, &o->buffer_size);
    if (!failed) {
        Py_INCREF(o->rows[0]), Py_INCREF(o->rows[1]), Py_INCREF(o->own_ranges), Py_INCREF(o->memories);
        Py_ssize_t ranges = PyBytes_GET_SIZE(o->own_ranges);
        failed = PyBytes_GET_SIZE(o->rows[0]) != o->row || PyBytes_GET_SIZE(o->rows[1]) != o->row ||
                 PyBytes_GET_SIZE(seen) != o->heads_size + (ranges ? o->ranges_size : 0);
        for (int i = 0; i < BUFFERS && !failed; i++)
            failed = read_program(&o->filling[i], filling[i]) < 0 || read_program(&o->staged_program[i], staged[i]) < 0;
        failed = failed || read_program(&o->program, program) < 0 || complete(o, o->filling) < 0 ||
                 complete(o, o->staged_program) < 0;
        if (failed && !PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "known: got other sizes, or something that is no step");
    } else {
        o->rows[0] = o->rows[1] = o->own_ranges = o->memories = NULL;
    }
    if (failed)
        forget(o);
    else
        o->seen = Py_NewRef(seen);
    Py_DECREF(known);
    return failed ? -1 : 0;
}

/* Calls a function of the Operation, and learns what that has worked out. */
static PyObject *in_python(OneCopy *o, PyObject *done)
{
    if (done == NULL)
        return NULL;
    Py_DECREF(done);
    return learn(o) < 0 ? NULL : Py_NewRef(Py_None);
}

/* 1 if the allocations that the arrays lie in live; -1 for an error. */
static int all_live(OneCopy *o)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o->memories); i++) {
        PyObject *memory = PyObject_CallNoArgs(PyTuple_GET_ITEM(o->memories, i));
        Py_XDECREF(memory);
        if (memory == NULL || memory == Py_None)
            return memory == NULL ? -1 : 0;
    }
    return 1;
}

static int is_as_known(const OneCopy *o, int64_t turn)
{
    const char *memory = o->memory.buf, *seen = PyBytes_AS_STRING(o->seen);
    return memcmp(memory + o->heads[turn], seen, (size_t)o->heads_size) == 0 &&
           (PyBytes_GET_SIZE(o->own_ranges) == 0 ||
            memcmp(memory + o->ranges[turn], seen + o->heads_size, (size_t)o->ranges_size) == 0);
}

static PyObject *run(PyObject *self, PyObject *const *arguments, size_t count, PyObject *names)
{
    OneCopy *o = (OneCopy *)self;
    int64_t *buffer = o->staging.buf, *is_ready = buffer + 1;
    int live = o->seen == NULL ? 0 : all_live(o);
    if (live < 0)
        return NULL;
    int fills = live && o->may_fill && *is_ready;
    if (!live || (fills && o->chunks && o->filling[*buffer].kept == NULL))
        return in_python(o, PyObject_CallNoArgs(o->slow));
    if (fills && o->chunks && run_program(o, &o->filling[*buffer]) < 0)
        return NULL;
    int64_t turn = *(int64_t *)o->turn.buf;
    *(int64_t *)o->turn.buf = 1 - turn;
    char *memory = o->memory.buf;
    memcpy(memory + o->heads[turn] + o->rank * o->row, PyBytes_AS_STRING(o->rows[fills]), (size_t)o->row);
    Py_ssize_t ranges = PyBytes_GET_SIZE(o->own_ranges);
    if (ranges)
        memcpy(memory + o->ranges[turn] + o->rank * ranges, PyBytes_AS_STRING(o->own_ranges), (size_t)ranges);
    if (meet(o) < 0)
        return NULL;
    Program *staged = &o->staged_program[*buffer];
    if (!is_as_known(o, turn) || (o->staged && staged->kept == NULL))
        return in_python(o, PyObject_CallFunction(o->go_on, "L", (long long)turn));
    if (run_program(o, &o->program) < 0 || (o->staged && run_program(o, staged) < 0))
        return NULL;
    if (o->staged)
        *buffer = (*buffer + o->chunks) % BUFFERS;
    return Py_NewRef(Py_None);
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    static char *keywords[] = {"slow", "go_on", "known", "numbers", "memory", "turn", "met", "staging",
                               "heads", "ranges", "rank", "row", "ranks", NULL};
    PyObject *slow, *go_on, *known, *numbers, *memory, *turn, *met, *staging;
    Py_ssize_t heads[TURNS], ranges[TURNS], rank, row, ranks;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOOO!OOOO(nn)(nn)nnn", keywords, &slow, &go_on, &known,
                                     &NumbersType, &numbers, &memory, &turn, &met, &staging, &heads[0], &heads[1],
                                     &ranges[0], &ranges[1], &rank, &row, &ranks))
        return NULL;
    OneCopy *o = (OneCopy *)type->tp_alloc(type, 0);
    if (o == NULL)
        return NULL;
    o->run = run, o->rank = rank, o->row = row;
    o->slow = Py_NewRef(slow), o->go_on = Py_NewRef(go_on), o->known = Py_NewRef(known);
    o->numbers = (Numbers *)Py_NewRef(numbers);
    memcpy(o->heads, heads, sizeof heads);
    memcpy(o->ranges, ranges, sizeof ranges);
    o->heads_size = ranges[0] - heads[0], o->ranges_size = heads[1] - ranges[0];
    int failed = PyObject_GetBuffer(memory, &o->memory, PyBUF_WRITABLE) < 0 ||
                 PyObject_GetBuffer(turn, &o->turn, PyBUF_WRITABLE) < 0 ||
                 PyObject_GetBuffer(met, &o->met, PyBUF_WRITABLE) < 0 ||
                 PyObject_GetBuffer(staging, &o->staging, PyBUF_WRITABLE) < 0;
    if (!failed && (o->heads_size != ranks * row || o->ranges_size < 0 ||
                    ranges[1] + o->ranges_size > o->memory.len || o->staging.len < 2 * (Py_ssize_t)sizeof(int64_t))) {
        PyErr_SetString(PyExc_ValueError, "heads, ranges, staging: got other places than meetings have");
        failed = 1;
    }
    if (failed) {
        Py_DECREF(o);
        return NULL;
    }
    return (PyObject *)o;
}

static int traverse(OneCopy *o, visitproc visit, void *arg)
{
    Program *programs[] = {&o->filling[0], &o->filling[1], &o->filling[2], &o->staged_program[0], &o->staged_program[1],
                           &o->staged_program[2], &o->program};
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        Py_VISIT(programs[i]->kept); /* which has what its steps call */
    Py_VISIT(o->slow);
    Py_VISIT(o->go_on);
    Py_VISIT(o->known);
    Py_VISIT(o->numbers);
    Py_VISIT(o->memories);
    return 0;
}

static int clear(OneCopy *o)
{
    forget(o);
    Py_CLEAR(o->slow);
    Py_CLEAR(o->go_on);
    Py_CLEAR(o->known);
    Py_CLEAR(o->numbers);
    PyBuffer_Release(&o->memory);
    PyBuffer_Release(&o->turn);
    PyBuffer_Release(&o->met);
    PyBuffer_Release(&o->staging);
    return 0;
}

static void dealloc(OneCopy *o)
{
    PyObject_GC_UnTrack(o);
    clear(o);
    Py_TYPE(o)->tp_free(o);
}

PyTypeObject OneCopyType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "collectives.native.OneCopy",
    .tp_doc = "A one-copy collective that is made again; see one_copy.c.",
    .tp_basicsize = sizeof(OneCopy),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(OneCopy, run),
    .tp_call = PyVectorcall_Call,
    .tp_new = make,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)dealloc,
};
