#include <muon/kernels/device.h>

#include <cuda_runtime.h>

namespace muon::kernels {
namespace {

__global__ void write_architecture_kernel(int* architecture) {
#ifdef __CUDA_ARCH__
  *architecture = __CUDA_ARCH__;
#endif
}

bool failed(cudaError_t status, const char* action, std::string* error) {
  if (status == cudaSuccess) {
    return false;
  }
  (void)cudaGetLastError(); // a later launch must not report this failure
  if (error != nullptr) {
    *error = std::string("muon: ") + action + " failed: " + cudaGetErrorString(status);
  }
  return true;
}

} // namespace

const char* build_description() {
  return MUON_CUDA_DESCRIPTION;
}

int device_count(std::string* error) {
  int count = 0;
  if (failed(cudaGetDeviceCount(&count), "counting the CUDA devices", error)) {
    return 0;
  }
  if (count == 0 && error != nullptr) {
    *error = "muon: the CUDA driver sees no device; check CUDA_VISIBLE_DEVICES";
  }
  return count;
}

int compiled_architecture(std::string* error) {
  int* device_value = nullptr;
  if (failed(cudaMalloc(&device_value, sizeof(int)), "allocating on the device", error)) {
    return 0;
  }
  write_architecture_kernel<<<1, 1>>>(device_value);
  int architecture = 0;
  const bool broken = failed(cudaGetLastError(), "launching a kernel", error) ||
      failed(cudaMemcpy(&architecture, device_value, sizeof(int), cudaMemcpyDeviceToHost),
             "running a kernel", error);
  (void)cudaFree(device_value);
  return broken ? 0 : architecture;
}

} // namespace muon::kernels
