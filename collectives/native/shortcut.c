/* Shortcut: a method of Communicator that finds an operation again by its arguments, and issues it.

   The key is the method's name, the signature of each array, and each other argument, which is None, a string or an
   integer. With anything else, and with async_op or a timeout, the method in Python is called as it stands. It is also
   called where the key is not known, for what it has prepared, which is then kept under the key. */

#include "native.h"

enum { MOST = 8 };

typedef struct {
    PyObject_HEAD
    vectorcallfunc run;
    PyObject *method, *name;
    PyObject *parameters; /* names, without self, async_op and timeout: first those that may be given by position */
    PyObject *defaults;   /* of these; Ellipsis where there is none */
    PyObject *not_yet, *attributes;
    Py_ssize_t by_position;
} Shortcut;

static PyObject *name_shortcuts, *name_keep, *name_async, *name_timeout, *name_at_once;

/* The place of a parameter; -1 for another name. */
static Py_ssize_t place_of(Shortcut *s, PyObject *name)
{
    Py_ssize_t count = PyTuple_GET_SIZE(s->parameters);
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyTuple_GET_ITEM(s->parameters, i) == name)
            return i;
    return -1;
}

/* The key of a call; NULL without an error where there is none. */
static PyObject *key_of(Shortcut *s, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    PyObject *values[MOST];
    Py_ssize_t parameters = PyTuple_GET_SIZE(s->parameters);
    if (count > s->by_position)
        return NULL;
    for (Py_ssize_t i = 0; i < parameters; i++)
        values[i] = i < count ? given[i] : PyTuple_GET_ITEM(s->defaults, i);
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i), *value = given[count + i];
        Py_ssize_t place = place_of(s, name);
        if (place >= count)
            values[place] = value;
        else if (!((name == name_async && value == Py_False) || (name == name_timeout && value == Py_None)))
            return NULL;
    }
    PyObject *key = PyTuple_New(parameters + 1);
    if (key == NULL)
        return NULL;
    PyTuple_SET_ITEM(key, 0, Py_NewRef(s->name));
    for (Py_ssize_t i = 0; i < parameters; i++) {
        PyObject *value = values[i], *part = NULL;
        if (value == Py_None || PyUnicode_CheckExact(value) || PyLong_CheckExact(value))
            part = Py_NewRef(value);
        else if (is_plain_array(value))
            part = signature(NULL, value);
        if (part == NULL || (part == Py_None && value != Py_None)) {
            Py_XDECREF(part);
            Py_DECREF(key);
            return NULL;
        }
        PyTuple_SET_ITEM(key, i + 1, part);
    }
    return key;
}

/* Lets the method prepare the operation, and keeps it; returns what issues it. */
static PyObject *prepare(Shortcut *s, PyObject *key, PyObject *const *given, Py_ssize_t count, PyObject *names)
{
    PyObject *made = NULL, *kept = NULL, *found = NULL;
    PyObject *arguments = PyTuple_New(count), *keywords = PyDict_New();
    if (arguments == NULL || keywords == NULL)
        goto end;
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(arguments, i, Py_NewRef(given[i]));
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(keywords, PyTuple_GET_ITEM(names, i), given[count + i]) < 0)
            goto end;
    if (PyDict_SetItem(keywords, name_timeout, s->not_yet) < 0)
        goto end;
    made = PyObject_Call(s->method, arguments, keywords);
    if (made == NULL)
        goto end;
    kept = PyObject_CallMethodObjArgs(given[0], name_keep, key, made, NULL);
    if (kept != NULL)
        found = PyObject_GetAttr(made, name_at_once);
end:
    Py_XDECREF(arguments);
    Py_XDECREF(keywords);
    Py_XDECREF(made);
    Py_XDECREF(kept);
    return found;
}

static PyObject *run(PyObject *self, PyObject *const *given, size_t flags, PyObject *names)
{
    Shortcut *s = (Shortcut *)self;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *key = count > 0 ? key_of(s, given + 1, count - 1, names) : NULL;
    if (key == NULL)
        return PyErr_Occurred() ? NULL : PyObject_Vectorcall(s->method, given, flags, names);
    PyObject *table = PyObject_GetAttr(given[0], name_shortcuts);
    PyObject *found = table != NULL ? Py_XNewRef(PyDict_GetItemWithError(table, key)) : NULL;
    Py_XDECREF(table);
    if (found == NULL && !PyErr_Occurred())
        found = prepare(s, key, given, count, names);
    Py_DECREF(key);
    if (found == NULL)
        return NULL;
    /* What must live until the operation has run: the arguments. */
    PyObject *arrays = count == 2 ? Py_NewRef(given[1]) : PyTuple_New(count - 1 + (names ? PyTuple_GET_SIZE(names) : 0));
    for (Py_ssize_t i = 0; arrays != NULL && count != 2 && i < PyTuple_GET_SIZE(arrays); i++)
        PyTuple_SET_ITEM(arrays, i, Py_NewRef(given[1 + i]));
    PyObject *done = arrays != NULL ? PyObject_CallOneArg(found, arrays) : NULL;
    Py_XDECREF(arrays);
    Py_DECREF(found);
    return done;
}

static PyObject *get(PyObject *self, PyObject *object, PyObject *type)
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    static char *keywords[] = {"method", "name", "parameters", "defaults", "by_position", "not_yet", NULL};
    PyObject *method, *name, *parameters, *defaults, *not_yet;
    Py_ssize_t by_position;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OO!O!O!nO", keywords, &method, &PyUnicode_Type, &name,
                                     &PyTuple_Type, &parameters, &PyTuple_Type, &defaults, &by_position, &not_yet))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(parameters);
    if (count > MOST || count != PyTuple_GET_SIZE(defaults) || by_position > count)
        return PyErr_Format(PyExc_ValueError, "parameters: got %zd; needs up to %d, a default for each", count, MOST);
    Shortcut *s = (Shortcut *)type->tp_alloc(type, 0);
    if (s == NULL)
        return NULL;
    s->run = run;
    s->method = Py_NewRef(method), s->name = Py_NewRef(name), s->parameters = Py_NewRef(parameters);
    s->defaults = Py_NewRef(defaults), s->not_yet = Py_NewRef(not_yet), s->by_position = by_position;
    return (PyObject *)s;
}

static int traverse(Shortcut *s, visitproc visit, void *arg)
{
    Py_VISIT(s->method);
    Py_VISIT(s->defaults);
    Py_VISIT(s->not_yet);
    Py_VISIT(s->attributes);
    return 0;
}

static int clear(Shortcut *s)
{
    Py_CLEAR(s->method);
    Py_CLEAR(s->name);
    Py_CLEAR(s->parameters);
    Py_CLEAR(s->defaults);
    Py_CLEAR(s->not_yet);
    Py_CLEAR(s->attributes);
    return 0;
}

static void dealloc(Shortcut *s)
{
    PyObject_GC_UnTrack(s);
    clear(s);
    Py_TYPE(s)->tp_free(s);
}

static PyGetSetDef getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, "what functools.wraps sets", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject ShortcutType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "collectives.native.Shortcut",
    .tp_basicsize = sizeof(Shortcut),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Shortcut, run),
    .tp_call = PyVectorcall_Call,
    .tp_new = make,
    .tp_descr_get = get,
    .tp_getset = getset,
    .tp_dictoffset = offsetof(Shortcut, attributes),
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)dealloc,
};

int intern_shortcut(void)
{
    name_shortcuts = PyUnicode_InternFromString("_shortcuts");
    name_keep = PyUnicode_InternFromString("_keep_shortcut");
    name_async = PyUnicode_InternFromString("async_op");
    name_timeout = PyUnicode_InternFromString("timeout");
    name_at_once = PyUnicode_InternFromString("at_once");
    return name_shortcuts && name_keep && name_async && name_timeout && name_at_once ? 0 : -1;
}
