// The fast path of eager: Python functions that go straight to the served collectives, in a module
// of their own, since this is all that needs Python's and torch_python's headers. They have the names
// of the table's rows.
//
// Each returns NotImplemented unless the call is an ordinary one: plain CPU tensors, of which no
// autograd, mode, transform or profiler wants to know, on a group that has shared memory by now.
// The caller then goes another way, which also says what is wrong with a call.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <sys/syscall.h>
#include <unistd.h>

#include <optional>
#include <unordered_map>
#include <variant>

#include "backend.h"
#include "buckets.h"
#include "compiled.h"
#include "gradients.h"
#include "served.h"
#include "tensors.h"
#include "wait.h"

namespace {

namespace served = fcoll::served;
using at::Tensor;
using fcoll::Op;
using fcoll::served::GroupPtr;
using Args = PyObject* const*;

// Python's callbacks (fcoll/eager/dispatch.py).
struct Callbacks {
  PyObject *world, *name_of_mesh, *in_flight, *error;
} callbacks;

PyObject* not_served() { Py_RETURN_NOTIMPLEMENTED; }

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// For waits (wait.h): run Python's signal handlers, and raise what they raise. Handlers run in the
// main thread only.
void look_for_signals() {
  if (syscall(SYS_gettid) != getpid()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error raised;
  raised.persist();
  throw raised;
}

// -- is it an ordinary call? ----------------------------------------------------------------------

// Modes, transforms and tracers include a dispatch key of their own while they are active.
bool nobody_listens() {
  auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included.raw_repr() & ~c10::default_included_set.raw_repr()) == 0 &&
         !at::impl::torch_function_mode_enabled() && !at::hasCallbacks();
}

// Conjugate, negative, sparse, quantized, batched, functional and all other tensors that are not
// what their memory is have a key besides these.
const c10::DispatchKeySet PLAIN_KEYS({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                      c10::DispatchKey::AutogradCPU,
                                      c10::DispatchKey::AutocastCPU});

bool has_plain_keys(const Tensor& x) {
  auto keys = x.key_set();
  return keys.has(c10::DispatchKey::CPU) && (keys.raw_repr() & ~PLAIN_KEYS.raw_repr()) == 0 &&
         !x._fw_grad(0).defined();
}

const Tensor* plain(PyObject* x) {
  if (!THPVariable_CheckExact(x)) return nullptr;
  const Tensor& t = THPVariable_Unpack(x);
  bool differentiated = t.requires_grad() && at::GradMode::is_enabled();
  return has_plain_keys(t) && !differentiated ? &t : nullptr;
}

std::optional<std::vector<Tensor>> plain_list(PyObject* xs) {
  if (!PyList_CheckExact(xs) && !PyTuple_CheckExact(xs)) return std::nullopt;
  std::vector<Tensor> found;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(xs); i++) {
    const Tensor* x = plain(PySequence_Fast_GET_ITEM(xs, i));
    if (!x) return std::nullopt;
    found.push_back(*x);
  }
  if (found.empty()) return std::nullopt;
  return found;
}

const Op* reduce_op(PyObject* given) {
  if (!PyUnicode_CheckExact(given)) return nullptr;
  static const std::vector<std::pair<PyObject*, const Op*>> known = [] {
    std::vector<std::pair<PyObject*, const Op*>> names;
    for (const auto& [name, op] : fcoll::tensors::OPS)
      names.emplace_back(PyUnicode_InternFromString(name.c_str()), &op);
    return names;
  }();
  for (const auto& [name, op] : known)  // literals in a program are interned: often the same object
    if (name == given) return op;
  for (const auto& [name, op] : known)
    if (PyUnicode_Compare(name, given) == 0) return op;
  return nullptr;
}

// None for what is neither "sum" nor "identity".
std::optional<bool> grad_is_identity(PyObject* given) {
  if (!PyUnicode_CheckExact(given)) return std::nullopt;
  static PyObject *sum = PyUnicode_InternFromString("sum"),
                  *identity = PyUnicode_InternFromString("identity");
  if (given == sum || PyUnicode_Compare(given, sum) == 0) return false;
  if (PyUnicode_Compare(given, identity) == 0) return true;
  return std::nullopt;
}

std::optional<int64_t> integer(PyObject* given) {
  if (!PyLong_CheckExact(given)) return std::nullopt;
  int overflow;
  int64_t value = PyLong_AsLongLongAndOverflow(given, &overflow);
  return overflow ? std::nullopt : std::optional(value);
}

// None is no splits at all.
std::optional<std::vector<int64_t>> splits(PyObject* given) {
  std::vector<int64_t> found;
  if (given == Py_None) return found;
  if (!PyList_CheckExact(given) && !PyTuple_CheckExact(given)) return std::nullopt;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
    auto value = integer(PySequence_Fast_GET_ITEM(given, i));
    if (!value) return std::nullopt;
    found.push_back(*value);
  }
  if (found.empty()) return std::nullopt;
  return found;
}

// -- which group ----------------------------------------------------------------------------------

GroupPtr group_named(PyObject* name) {
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(name, &size);
  return text ? served::group_named(std::string(text, size)) : nullptr;
}

// Groups by the objects that were given for them, with Python's lock. A process group that goes closes
// its group (shared_memory.py): that is a change, so that no other object at its address is taken for it.
struct KnownGroup {
  std::string name;
  const void* process_group;
  std::weak_ptr<fcoll::Group> group;
};

GroupPtr group_of(PyObject* given) {
  static auto& known = *new std::unordered_map<PyObject*, KnownGroup>;
  static uint64_t changes = 0;
  if (uint64_t now = served::changes_of_groups(); now != changes) {
    known.clear();
    changes = now;
  }
  auto found = known.find(given);
  if (found == known.end()) {
    auto group = py::reinterpret_borrow<py::object>(given);
    if (!py::isinstance<c10d::ProcessGroup>(group)) return nullptr;
    auto* process_group = group.cast<c10d::ProcessGroup*>();
    std::string name = process_group->getGroupName();
    GroupPtr made = served::group_named(name, process_group);
    if (made) known[given] = {std::move(name), process_group, made};
    return made;
  }
  const auto& [name, process_group, group] = found->second;
  return served::stands_for(name, process_group) ? group.lock() : nullptr;
}

// The group's shared memory as it is now.
GroupPtr group_given(PyObject* given) {
  if (PyUnicode_CheckExact(given)) return group_named(given);
  py::object group = py::reinterpret_borrow<py::object>(given);
  if (given == Py_None) group = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(callbacks.world));
  if (GroupPtr found = group ? group_of(group.ptr()) : nullptr) return found;
  PyObject* name = group ? PyObject_CallOneArg(callbacks.name_of_mesh, group.ptr()) : nullptr;
  py::object owned = py::reinterpret_steal<py::object>(name);
  GroupPtr found = name && PyUnicode_CheckExact(name) ? group_named(name) : nullptr;
  PyErr_Clear();
  return found;
}

// -- the call -------------------------------------------------------------------------------------

// Throws the exception that Python makes of the message of an error of the core's; torch hands it
// on to Python wherever it catches it, in ops, in methods and in autograd's threads.
void raise_in_python(const std::string& message) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  PyObject* error = PyObject_CallFunction(callbacks.error, "s", message.c_str());
  if (error) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_XDECREF(error);
  python_error thrown;
  thrown.persist();
  throw thrown;
}

PyObject* wrapped(served::Result result, const char* name) {
  if (!result.out.defined()) return not_served();
  PyObject* out = THPVariable_Wrap(std::move(result.out));
  if (!result.under_way || !out) return out;
  PyObject* async = PyObject_CallFunction(callbacks.in_flight, "Os", out, name);
  Py_DECREF(out);
  return async;
}

PyObject* wrapped(std::vector<Tensor> outs, const char*) {
  return outs.empty() ? not_served() : THPVariable_WrapList(outs);
}

PyObject* wrapped(std::monostate, const char*) { Py_RETURN_NONE; }

// serve(group), without the GIL, as a Python object.
template <class Serve>
PyObject* run(const char* name, PyObject* group, Serve serve) {
  GroupPtr g = nobody_listens() ? group_given(group) : nullptr;
  if (!g) return not_served();
  auto result = [&] {
    WithoutGil released;
    return serve(g);
  }();
  return wrapped(std::move(result), name);
}

// A Python function of `count` arguments, with C++ exceptions as Python's.
template <int count, PyObject* (*function)(Args)>
PyObject* called(PyObject*, Args args, Py_ssize_t given) {
  if (given != count) return PyErr_Format(PyExc_TypeError, "expected %d arguments", count);
  try {
    return function(args);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// -- the functions, with the arguments of functions.py in its order -------------------------------

PyObject* all_reduce(Args args) {  // x, op, group, grad
  const Tensor* x = plain(args[0]);
  const Op* op = reduce_op(args[1]);
  auto grad = grad_is_identity(args[3]);
  if (!x || !op || !grad) return not_served();
  return run("all_reduce", args[2], [x = *x, op, grad](const GroupPtr& g) {
    return served::all_reduce(g, x, *op, *grad);
  });
}

PyObject* all_gather_into_tensor(Args args) {  // x, group, dim
  const Tensor* x = plain(args[0]);
  auto dim = integer(args[2]);
  if (!x || !dim) return not_served();
  if (*dim < 0) *dim += x->dim();
  return run("all_gather_into_tensor", args[1], [x = *x, dim](const GroupPtr& g) {
    return served::all_gather(g, x, *dim);
  });
}

PyObject* reduce_scatter_tensor(Args args) {  // x, op, group, dim
  const Tensor* x = plain(args[0]);
  const Op* op = reduce_op(args[1]);
  auto dim = integer(args[3]);
  if (!x || !op || !dim) return not_served();
  if (*dim < 0) *dim += x->dim();
  return run("reduce_scatter_tensor", args[2], [x = *x, op, dim](const GroupPtr& g) {
    return served::reduce_scatter(g, x, *op, *dim);
  });
}

PyObject* all_to_all_single(Args args) {  // x, group, output_splits, input_splits
  const Tensor* x = plain(args[0]);
  auto outs = splits(args[2]), ins = splits(args[3]);
  if (!x || !outs || !ins || outs->empty() != ins->empty()) return not_served();
  return run("all_to_all_single", args[1], [x = *x, &outs, &ins](const GroupPtr& g) {
    return served::all_to_all(g, x, *outs, *ins);
  });
}

PyObject* broadcast(Args args) {  // x, src, group
  const Tensor* x = plain(args[0]);
  auto src = integer(args[1]);
  if (!x || !src) return not_served();
  return run("broadcast", args[2], [x = *x, src](const GroupPtr& g) {
    return served::broadcast(g, x, *src);
  });
}

PyObject* all_reduce_coalesced(Args args) {  // xs, op, group, grad
  auto xs = plain_list(args[0]);
  const Op* op = reduce_op(args[1]);
  auto grad = grad_is_identity(args[3]);
  if (!xs || !op || !grad) return not_served();
  return run("all_reduce_coalesced", args[2], [&](const GroupPtr& g) {
    return served::all_reduce_coalesced(g, *xs, *op, *grad);
  });
}

PyObject* all_gather_into_tensor_coalesced(Args args) {  // xs, group, dim
  auto xs = plain_list(args[0]);
  if (!xs || integer(args[2]) != 0) return not_served();
  return run("all_gather_into_tensor_coalesced", args[1], [&](const GroupPtr& g) {
    return served::all_gather_coalesced(g, *xs);
  });
}

PyObject* reduce_scatter_tensor_coalesced(Args args) {  // xs, op, group, dim
  auto xs = plain_list(args[0]);
  const Op* op = reduce_op(args[1]);
  if (!xs || !op || integer(args[3]) != 0) return not_served();
  return run("reduce_scatter_tensor_coalesced", args[2], [&](const GroupPtr& g) {
    return served::reduce_scatter_coalesced(g, *xs, *op);
  });
}

PyObject* barrier(Args args) {  // group
  return run("barrier", args[0], [](const GroupPtr& g) {
    fcoll::tensors::guarded([&] { g->run(fcoll::Call::barrier(), nullptr, nullptr); });
    return std::monostate();
  });
}

// x itself, complete, if it is not async. That a gradient is needed for it changes nothing.
PyObject* wait_tensor(Args args) {
  if (!THPVariable_CheckExact(args[0]) || !nobody_listens() ||
      !has_plain_keys(THPVariable_Unpack(args[0])))
    return not_served();
  if (!served::nothing_under_way()) {
    Tensor x = THPVariable_Unpack(args[0]);
    WithoutGil released;
    c10d::wait_tensor(x);
  }
  return Py_NewRef(args[0]);
}

PyObject* issued_in_thread(Args) {
  served::issued_in_thread();
  Py_RETURN_NONE;
}

// -- what compiled graphs call: the ops of compiled.h, by their arguments, without a dispatcher ------

std::string text(PyObject* given) {
  const char* found = PyUnicode_AsUTF8(given);
  if (!found) throw std::runtime_error("fcoll: expected a string");
  return found;
}

std::vector<int64_t> sizes(PyObject* given) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++)
    found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(given, i)));
  return found;
}

template <class Call>
auto without_gil(Call call) {
  WithoutGil released;
  return call();
}

PyObject* claim(Args args) {  // group, lane, size, stride, dtype
  auto dtype = reinterpret_cast<THPDtype*>(args[4])->scalar_type;
  auto group = text(args[0]);
  int64_t lane = PyLong_AsLongLong(args[1]);
  auto size = sizes(args[2]), stride = sizes(args[3]);
  return THPVariable_Wrap(without_gil(
      [&] { return fcoll::compiled::claim(group, lane, size, stride, dtype, at::kCPU); }));
}

PyObject* meet(Args args) {  // own, collective, op, group, dim
  const Tensor& own = THPVariable_Unpack(args[0]);
  auto collective = text(args[1]), op = text(args[2]), group = text(args[3]);
  int64_t dim = PyLong_AsLongLong(args[4]);
  return THPVariable_WrapList(
      without_gil([&] { return fcoll::compiled::meet(own, collective, op, group, dim); }));
}

PyObject* announce(Args args) {  // own, collective, op, group, dim
  const Tensor& own = THPVariable_Unpack(args[0]);
  auto collective = text(args[1]), op = text(args[2]), group = text(args[3]);
  int64_t dim = PyLong_AsLongLong(args[4]);
  return THPVariable_Wrap(
      without_gil([&] { return fcoll::compiled::announce(own, collective, op, group, dim); }));
}

PyObject* collect(Args args) {  // token, own, collective, group
  const Tensor &token = THPVariable_Unpack(args[0]), &own = THPVariable_Unpack(args[1]);
  auto collective = text(args[2]), group = text(args[3]);
  return THPVariable_WrapList(
      without_gil([&] { return fcoll::compiled::collect(token, own, collective, group); }));
}

PyObject* meet_and_reduce(Args args) {  // own, collective, op, group, dim
  const Tensor& own = THPVariable_Unpack(args[0]);
  auto collective = text(args[1]), op = text(args[2]), group = text(args[3]);
  int64_t dim = PyLong_AsLongLong(args[4]);
  return THPVariable_Wrap(
      without_gil([&] { return fcoll::compiled::meet_and_reduce(own, collective, op, group, dim); }));
}

PyObject* set_callbacks(Args args) {  // world, name_of_mesh, in_flight, error
  callbacks = {Py_NewRef(args[0]), Py_NewRef(args[1]), Py_NewRef(args[2]), Py_NewRef(args[3])};
  fcoll::tensors::raise_by(&raise_in_python);
  Py_RETURN_NONE;
}

#define FUNCTION(name, count) \
  {#name, reinterpret_cast<PyCFunction>(&called<count, name>), METH_FASTCALL, nullptr}

PyMethodDef FUNCTIONS[] = {FUNCTION(all_reduce, 4),
                           FUNCTION(all_gather_into_tensor, 3),
                           FUNCTION(reduce_scatter_tensor, 4),
                           FUNCTION(all_to_all_single, 4),
                           FUNCTION(broadcast, 3),
                           FUNCTION(all_reduce_coalesced, 4),
                           FUNCTION(all_gather_into_tensor_coalesced, 3),
                           FUNCTION(reduce_scatter_tensor_coalesced, 4),
                           FUNCTION(set_callbacks, 4),
                           FUNCTION(barrier, 1),
                           FUNCTION(wait_tensor, 1),
                           FUNCTION(issued_in_thread, 0),
                           FUNCTION(claim, 5),
                           FUNCTION(meet, 5),
                           FUNCTION(announce, 5),
                           FUNCTION(collect, 4),
                           FUNCTION(meet_and_reduce, 5),
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "fcoll_fast", nullptr, -1, FUNCTIONS,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fcoll_fast() {
  fcoll::check_signals = &look_for_signals;
  PyObject* made = PyModule_Create(&MODULE);
  if (made) {
    fcoll::gradients::add_to(py::reinterpret_borrow<py::module_>(made));
    fcoll::buckets::add_to(py::reinterpret_borrow<py::module_>(made));
    fcoll::backend::add_to(py::reinterpret_borrow<py::module_>(made));
  }
  return made;
}
