/* The module collectives.native.compiled: see collectives/native/__init__.py. */

#include "native.h"

static PyMethodDef functions[] = {
    {"look_at", look_at, METH_VARARGS, "Says what `signature` works with; see arrays.c."},
    {"signature", signature, METH_O, "The array's signature, as base.buffers.signature gives it."},
    {"in_background", in_background, METH_O, "Whether this thread runs operations beside the program."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "compiled", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_compiled(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddIntConstant(made, "VERSION", 2) < 0 || intern_at_once() < 0 || intern_shortcut() < 0 || PyModule_AddType(made, &AtOnceType) < 0 ||
        PyModule_AddType(made, &MpiCallType) < 0 || PyModule_AddType(made, &NumbersType) < 0 ||
        PyModule_AddType(made, &ShortcutType) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
