#pragma once

#include "step_views.h"

namespace muon::detail {

/// One pass of an elementwise algorithm over its parameters.
void run_elementwise(const Step& step, const ElementwiseRun& run);

} // namespace muon::detail
