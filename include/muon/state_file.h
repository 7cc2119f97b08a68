#pragma once

#include <string>

#include <muon/export.h>
#include <muon/optimizer.h>

namespace muon {

/// Writes an optimizer's state and options to `path`, in the file that
/// libmuon.save_state (Python) writes too. Whatever happens meanwhile, `path` holds the
/// former file or the new one, whole. State that no step has created yet is
/// created for the file. ValueError for parameters of one name; c10::Error with
/// the system's reason where the file cannot be written.
///
/// Note [State of an optimizer in a file]
/// A safetensors file with a checksum (src/state/file.h). A tensor's name is
/// "parameter/key", such as "blocks.0.weight/momentum_buffer"; a parameter without
/// a name is "GROUP.INDEX", its place. Metadata:
///
///   format   "libmuon state"
///   version  "1"
///   groups   JSON: a list of
///     {"algorithm": "muon",
///      "options": {"lr": 0.02, "ns_coefficients": "muon", ...},
///      "algorithm_options": {...},
///      "params": [{"name": "a.weight" or null, "shape": [8, 4], "dtype": "float32"}, ...],
///      "extra": {...}}
///
/// Options have Python's names and values (null, booleans, numbers, texts,
/// lists; ns_coefficients is a schedule's name or a list of triples). How a run stores and
/// computes is not among them (`state_dtype`, `batch_size`, `form` and their like).
/// algorithm_options are those of an algorithm of the user's own; `extra` is
/// what a Python group holds besides (numbers, texts, booleans, null), which C++ ignores.
MUON_API void save_state(const Muon& optimizer, const std::string& path);

/// Loads such a file, as a whole or not at all: everything is read and checked
/// before the first change. Parameters are found by name, wherever they stand
/// in the groups, and by their place if the file or the optimizer has no
/// names. Each group takes the options that the file has for its parameters;
/// options of this run stay, and the state gets the dtype, format and device that this
/// optimizer would have created it with.
///
/// ValueError naming what is wrong and the parameter: a damaged file, another
/// version, parameters that are missing on either side, shapes, algorithms or
/// state keys that differ, a group whose parameters have different options in the file.
MUON_API void load_state(Muon& optimizer, const std::string& path);

} // namespace muon
