// Goes on with a run from its state file, for tests/python/test_state_file_languages.py.
//   state_resume TENSORS STATE ALGORITHM STATE_DTYPE ROUNDING OUT_TENSORS OUT_STATE
// TENSORS holds weights "0", "1", ... and gradients "STEP.0", "STEP.1", ...; STATE may be "-".
#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <muon/muon.h>

#include "state/file.h"

namespace {

using Tensors = std::map<std::string, at::Tensor>;

const std::map<std::string, c10::ScalarType> kStateDtypes = {
    {"float32", at::kFloat},
    {"bfloat16", at::kBFloat16},
    {"int8", at::kChar},
    {"int4", at::ScalarType::Int4},
    {"fp8", at::ScalarType::Float8_e4m3fn}};

muon::MuonOptions make_options(
    const std::string& algorithm, const std::string& state_dtype, const std::string& rounding) {
  muon::MuonOptions options(0.02);
  // What Python's constructor gives to every algorithm.
  options.algorithm(algorithm).weight_decay(0.1).eps(1e-7);
  if (state_dtype != "None") {
    options.state_dtype(kStateDtypes.at(state_dtype));
  }
  options.stochastic_rounding(rounding == "stochastic");
  options.split_master(rounding == "split");
  return options;
}

Tensors read(const std::string& path) {
  muon::detail::StateFile file = muon::detail::read_state_file(path);
  return {file.tensors.begin(), file.tensors.end()};
}

void run(const std::vector<std::string>& arguments) {
  const Tensors tensors = read(arguments.at(0));
  std::vector<at::Tensor> params;
  std::vector<std::string> names;
  for (std::size_t i = 0; tensors.contains(std::to_string(i)); ++i) {
    params.push_back(tensors.at(std::to_string(i)).clone().requires_grad_());
    names.push_back("weight" + std::to_string(i));
  }
  muon::MuonOptions options = make_options(arguments.at(2), arguments.at(3), arguments.at(4));
  auto group = std::make_unique<muon::MuonOptions>(options);
  group->param_names(names);
  muon::Muon optimizer({torch::optim::OptimizerParamGroup(params, std::move(group))}, options);
  if (arguments.at(1) != "-") {
    muon::load_state(optimizer, arguments[1]);
  }
  for (int step = 0; tensors.contains(std::to_string(step) + ".0"); ++step) {
    for (std::size_t i = 0; i < params.size(); ++i) {
      params[i].mutable_grad() = tensors.at(std::to_string(step) + '.' + std::to_string(i)).clone();
    }
    optimizer.step();
  }
  muon::detail::StateFile out;
  for (std::size_t i = 0; i < params.size(); ++i) {
    out.tensors.emplace_back(std::to_string(i), params[i].detach());
  }
  muon::detail::write_state_file(arguments.at(5), out);
  muon::save_state(optimizer, arguments.at(6));
}

} // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
