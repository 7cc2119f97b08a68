#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include <muon/optimizer.h>

namespace muon::testing {

/// A row of the contract: groups with options, the same values at every call.
struct OptionSet {
  std::string name;
  std::function<std::vector<torch::optim::OptimizerParamGroup>()> make;
};

std::ostream& operator<<(std::ostream& out, const OptionSet& set);

/// The learning rate of every group of every set.
constexpr double kLr = 0.05;

std::vector<OptionSet> option_sets();

} // namespace muon::testing
