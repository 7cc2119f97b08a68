#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <muon/optimizer.h>

/// The words of options in texts and files, the same as in Python.
namespace muon::detail {

template <typename Value>
using Names = std::vector<std::pair<std::string_view, Value>>;

inline const Names<AdjustLr> kAdjustLr = {
    {"original", AdjustLr::Original},
    {"match_rms_adamw", AdjustLr::MatchRmsAdamw},
    {"spectral_unclamped", AdjustLr::SpectralUnclamped},
    {"unscaled", AdjustLr::Unscaled}};
inline const Names<Normalization> kNormalization = {
    {"clamp", Normalization::Clamp},
    {"add", Normalization::Add}};
inline const Names<Form> kForm = {
    {"auto", Form::Auto},
    {"standard", Form::Standard},
    {"gram", Form::Gram},
    {"gram_x_restart", Form::GramXRestart}};
inline const Names<NonFinite> kNonFinite = {
    {"propagate", NonFinite::Propagate},
    {"skip", NonFinite::Skip}};
inline const Names<std::optional<c10::ScalarType>> kComputeDtype = {
    {"auto", std::nullopt},
    {"float64", c10::ScalarType::Double},
    {"float32", c10::ScalarType::Float},
    {"bfloat16", c10::ScalarType::BFloat16},
    {"float16", c10::ScalarType::Half}};
inline const Names<StateFormat> kStateFormat = {
    {"plain", StateFormat::Plain},
    {"int8", StateFormat::Int8},
    {"int4", StateFormat::Int4},
    {"fp8", StateFormat::Fp8}};
inline const Names<MomentumForm> kMomentumForm = {
    {"ema", MomentumForm::Ema},
    {"heavy_ball", MomentumForm::HeavyBall}};
inline const Names<DecayLr> kDecayLr = {{"lr", DecayLr::Plain}, {"adjusted", DecayLr::Adjusted}};
inline const Names<bool> kFlag = {{"0", false}, {"1", true}};

template <typename Value>
Value from_name(const Names<Value>& names, std::string_view key, std::string_view text) {
  std::vector<std::string> known;
  for (const auto& [name, value] : names) {
    if (name == text) {
      return value;
    }
    known.emplace_back(name);
  }
  TORCH_CHECK_VALUE(
      false, "muon: expected ", key, " to be one of ", c10::Join(", ", known), ", got \"", text,
      "\"");
}

template <typename Value>
std::string_view to_name(const Names<Value>& names, const Value& value) {
  for (const auto& [name, candidate] : names) {
    if (candidate == value) {
      return name;
    }
  }
  TORCH_CHECK_VALUE(false, "muon: an option holds a value without a name");
}

} // namespace muon::detail
