#include <muon/kernels/device.h>

namespace muon::kernels {
namespace {

constexpr const char* kReason =
    "libmuon was built without CUDA kernels: install a CUDA toolkit (nvcc) and rebuild libmuon with "
    "-DMUON_CUDA=ON";

} // namespace

const char* build_description() {
  return "built without CUDA: rebuild libmuon where nvcc is found, with -DMUON_CUDA=ON";
}

int device_count(std::string* error) {
  if (error != nullptr) {
    *error = kReason;
  }
  return 0;
}

int compiled_architecture(std::string* error) {
  return device_count(error);
}

} // namespace muon::kernels
