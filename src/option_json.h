#pragma once

#include <string>

#include <muon/optimizer.h>

#include "state/json.h"

namespace muon::detail {

/// A group's options under Python's names, without those of the run and the
/// notes; Note [State of an optimizer in a file] in <muon/state_file.h>.
Json::Object options_to_json(const MuonOptions& options);

/// The options of such an object, `algorithm` and `own` (of the algorithm itself)
/// beside it; ValueError that begins with `context` for unknown names and
/// values of a wrong type.
MuonOptions options_from_json(
    const Json& options, const std::string& algorithm, const Json* own, const std::string& context);

} // namespace muon::detail
