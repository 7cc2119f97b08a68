// The Python module libmuon._C. It is empty: loading it loads libmuon.so, whose
// static initialisers register the ops.
//
// The few declarations of Python's stable ABI that an empty module takes are
// written out here, so that building libmuon needs no Python headers.
#include <cstddef>

namespace {

struct PyModuleDef { // of the limited API, PyObject_HEAD first
  std::ptrdiff_t ob_refcnt = 1;
  void* ob_type = nullptr;
  void* m_init = nullptr;
  std::ptrdiff_t m_index = 0;
  void* m_copy = nullptr;
  const char* m_name = "_C";
  const char* m_doc = "Loading this module registers torch.ops.muon.";
  std::ptrdiff_t m_size = 0;
  void* m_methods = nullptr;
  void* m_slots = nullptr;
  void* m_traverse = nullptr;
  void* m_clear = nullptr;
  void* m_free = nullptr;
};

PyModuleDef module_definition;

} // namespace

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): Python chose the names
extern "C" {

void* PyModuleDef_Init(PyModuleDef* definition);

__attribute__((visibility("default"))) void* PyInit__C() {
  return PyModuleDef_Init(&module_definition);
}

} // extern "C"
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
