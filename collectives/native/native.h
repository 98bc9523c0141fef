/* What the files of this folder share. */
#ifndef MPIDL_NATIVE_H
#define MPIDL_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

extern PyTypeObject AtOnceType, MpiCallType, NumbersType, OneCopyType, ShortcutType;

typedef struct {
    PyObject_HEAD
    Py_buffer own, asleep, *others;
    Py_ssize_t count;  /* of the others */
    int looks, yields; /* before a rank waits in Python, where it sleeps */
    PyObject *wake, *patiently;
} Numbers;

int advance_number(Numbers *numbers, int64_t number);
PyObject *wait_for_all(Numbers *numbers, int64_t target, PyObject *has_moved_on);
int is_in_background(void);

int intern_at_once(void);
int intern_shortcut(void);

PyObject *look_at(PyObject *module, PyObject *arguments);
PyObject *signature(PyObject *module, PyObject *array);
int is_plain_array(PyObject *object);
PyObject *in_background(PyObject *module, PyObject *on);

#endif
