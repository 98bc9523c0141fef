/* The signatures of arrays, as base/buffers.py:signature gives them.

   numpy's arrays are seen through the buffer protocol, torch's tensors through DLPack's exchange functions, which torch
   has from version 2.10 on: https://dmlc.github.io/dlpack/latest/c_api.html. */

#include "native.h"

/* DLPack 1: the description of a tensor, and the functions that a class of tensors offers. */
typedef struct {
    void *data;
    int32_t device_type, device;
    int32_t dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Described;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *own, *to_python;
    int (*describe)(void *tensor, Described *found);
} Exchange;

enum { CPU = 1, KINDS = 8, LARGEST = 64 };

static PyTypeObject *array_type;
static PyObject *tensor_types; /* a tuple */
static int (*describe)(void *, Described *);
static PyObject *dtypes[KINDS][LARGEST + 1];
static PyObject *shared;    /* a dict, empty where no memory is one for all ranks */
static PyObject *elsewhere; /* the function in Python, which knows all arrays */
static PyObject *name_dtype, *name_is_neg, *one_for_all_said;

/* look_at(ndarray, tensor types, exchange, dtypes, shared, elsewhere): says what `signature` works with.

   exchange: the capsule of DLPack's functions for these types, or None.
   dtypes: (kind, bits) of DLPack -> torch.dtype. */
PyObject *look_at(PyObject *module, PyObject *arguments)
{
    PyObject *array, *tensors, *exchange, *known, *one_for_all, *other, *key, *value;
    if (!PyArg_ParseTuple(arguments, "O!O!OO!O!O", &PyType_Type, &array, &PyTuple_Type, &tensors, &exchange,
                          &PyDict_Type, &known, &PyDict_Type, &one_for_all, &other))
        return NULL;
    if (exchange != Py_None) {
        Exchange *found = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
        if (found == NULL)
            return NULL;
        describe = found->major == 1 ? found->describe : NULL;
    }
    for (Py_ssize_t at = 0; PyDict_Next(known, &at, &key, &value);) {
        int kind, bits;
        if (!PyArg_ParseTuple(key, "ii", &kind, &bits))
            return NULL;
        if (kind >= 0 && kind < KINDS && bits >= 0 && bits <= LARGEST)
            Py_XSETREF(dtypes[kind][bits], Py_NewRef(value));
    }
    Py_XSETREF(array_type, (PyTypeObject *)Py_NewRef(array));
    Py_XSETREF(tensor_types, Py_NewRef(tensors));
    Py_XSETREF(shared, Py_NewRef(one_for_all));
    Py_XSETREF(elsewhere, Py_NewRef(other));
    if (name_dtype == NULL)
        name_dtype = PyUnicode_InternFromString("dtype");
    if (name_is_neg == NULL)
        name_is_neg = PyUnicode_InternFromString("is_neg");
    if (one_for_all_said == NULL)
        one_for_all_said = PyUnicode_InternFromString("one for all"); /* as in group/calls.py:signature_in_python */
    Py_RETURN_NONE;
}

static PyObject *in_python(PyObject *array)
{
    PyErr_Clear();
    return PyObject_CallOneArg(elsewhere, array);
}

/* True if memory there is the same for all ranks of the node. Nothing here runs the collector, which may free such. */
static int is_one_for_all(const void *place)
{
    Py_ssize_t at = 0;
    PyObject *number, *span;
    while (PyDict_Next(shared, &at, &number, &span))
        if ((uintptr_t)place >= PyLong_AsSize_t(PyTuple_GET_ITEM(span, 0)) &&
            (uintptr_t)place < PyLong_AsSize_t(PyTuple_GET_ITEM(span, 1)))
            return 1;
    return 0;
}

static PyObject *of_array(PyObject *array)
{
    Py_buffer seen;
    if (PyObject_GetBuffer(array, &seen, PyBUF_SIMPLE) != 0)
        return in_python(array);
    void *place = seen.buf;
    Py_ssize_t size = seen.itemsize ? seen.len / seen.itemsize : 0;
    int writeable = !seen.readonly;
    PyBuffer_Release(&seen);
    if (size == 0)
        return in_python(array);
    PyObject *dtype = PyObject_GetAttr(array, name_dtype);
    if (dtype == NULL)
        return NULL;
    PyObject *may_write = writeable ? Py_True : Py_False;
    if (is_one_for_all(place))
        return Py_BuildValue("NnNOO", PyLong_FromVoidPtr(place), size, dtype, may_write, one_for_all_said);
    return Py_BuildValue("NnNO", PyLong_FromVoidPtr(place), size, dtype, may_write);
}

static int is_contiguous(const Described *seen)
{
    int64_t expected = 1;
    for (int i = seen->dimensions - 1; seen->strides != NULL && i >= 0; i--) {
        if (seen->shape[i] != 1 && seen->strides[i] != expected)
            return 0;
        expected *= seen->shape[i];
    }
    return 1;
}

static PyObject *of_tensor(PyObject *tensor)
{
    Described seen;
    if (describe == NULL || describe(tensor, &seen) != 0)
        return in_python(tensor);
    PyObject *dtype = seen.kind < KINDS && seen.bits <= LARGEST ? dtypes[seen.kind][seen.bits] : NULL;
    if (seen.device_type != CPU || seen.lanes != 1 || dtype == NULL || seen.data == NULL || !is_contiguous(&seen))
        return in_python(tensor);
    PyObject *negative = PyObject_CallMethodNoArgs(tensor, name_is_neg);
    Py_XDECREF(negative);
    if (negative != Py_False)
        return in_python(tensor);
    int64_t elements = 1;
    for (int i = 0; i < seen.dimensions; i++)
        elements *= seen.shape[i];
    char *place = (char *)seen.data + seen.byte_offset;
    if (is_one_for_all(place))
        return Py_BuildValue("NLOO", PyLong_FromVoidPtr(place), (long long)elements, dtype, one_for_all_said);
    return Py_BuildValue("NLO", PyLong_FromVoidPtr(place), (long long)elements, dtype);
}

static int is_plain_tensor(PyObject *object)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensor_types); i++)
        if ((PyObject *)Py_TYPE(object) == PyTuple_GET_ITEM(tensor_types, i))
            return 1;
    return 0;
}

/* True if the object is an array of numpy's or a tensor of torch's own classes. */
int is_plain_array(PyObject *object)
{
    return Py_TYPE(object) == array_type || is_plain_tensor(object);
}

/* signature(array): as the function in Python. */
PyObject *signature(PyObject *module, PyObject *array)
{
    if (Py_TYPE(array) == array_type)
        return of_array(array);
    if (is_plain_tensor(array))
        return of_tensor(array);
    return in_python(array);
}
