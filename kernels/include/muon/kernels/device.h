#pragma once

#include <string>

namespace muon::kernels {

/// What the kernels were built with: "CUDA 13.0, sm_80 sm_90a", or the reason
/// why there are none.
const char* build_description();

/// The number of CUDA devices. Where it is 0 and `error` is given, `*error`
/// says why and how to change it; else `*error` is left alone.
int device_count(std::string* error);

/// Runs a kernel on the current device and returns the architecture that its
/// code was compiled for (800 for sm_80, 900 for sm_90a); 0, with the reason in
/// `*error`, where the device cannot run this build's kernels.
int compiled_architecture(std::string* error);

} // namespace muon::kernels
