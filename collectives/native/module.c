/* The module collectives.native.compiled: see collectives/native/__init__.py. */

#include "native.h"

static PyMethodDef functions[] = {
    {"look_at", look_at, METH_VARARGS, "Says what `signature` works with; see arrays.c."},
    {"signature", signature, METH_O, "The array's signature, as base.buffers.signature gives it."},
    {"in_background", in_background, METH_O, "Tells that this thread runs operations while the program computes."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "compiled", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_compiled(void)
{
    PyObject *made = PyModule_Create(&module);
    int failed = made == NULL || PyModule_AddIntConstant(made, "VERSION", 4) < 0 || intern_at_once() < 0 || intern_shortcut() < 0;
    PyTypeObject *types[] = {&AtOnceType, &MpiCallType, &NumbersType, &OneCopyType, &ShortcutType};
    for (size_t i = 0; i < sizeof types / sizeof *types && !failed; i++)
        failed = PyModule_AddType(made, types[i]) < 0;
    if (failed)
        Py_CLEAR(made);
    return made;
}
