// AdaMuon, an algorithm that libmuon does not have, registered from outside it: two stages of its own.
//   custom_algorithm --lr 0.016 --out out/adamuon.jsonl
// AdaMuon (Si, Zhang and Shen, arXiv 2507.11005) orthogonalises the sign of the momentum, divides by the
// root of a running mean of squares, and keeps the update's size. The momentum, the batches, the decay and
// the update of the parameters stay libmuon's. examples/python/custom_algorithm.py is the same program.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <muon/muon.h>
#include <torch/library.h>
#include <torch/serialize.h>
#include <nlohmann/json.hpp>

#include "gpt/arguments.h"
#include "gpt/corpus.h"
#include "gpt/model.h"
#include "gpt/progress.h"

namespace adamuon {

// Columns of `hyper`: this algorithm's own options, in the order of their registration.
constexpr std::int64_t kUpdateBeta = muon::Hyper::kCount;
constexpr std::int64_t kUpdateEps = muon::Hyper::kCount + 1;

// Orthogonalises the signs.
void orthogonalize_(
    at::Tensor matrices, const at::Tensor& hyper, at::IntArrayRef groups, std::string_view spec) {
  static const auto muon_orthogonalize =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("muon::orthogonalize_", "")
          .typed<void(at::Tensor, const at::Tensor&, at::IntArrayRef, std::string_view)>();
  muon_orthogonalize.call(matrices.sign_(), hyper, groups, spec);
}

// Divides by the root mean square; the norm becomes that of an orthogonal matrix.
void refine_(
    at::TensorList matrices, at::TensorList state, const at::Tensor& hyper,
    at::IntArrayRef groups) {
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const at::Tensor& o = matrices[i];
    const auto beta = hyper[groups[i]][kUpdateBeta].item<double>();
    const auto eps = hyper[groups[i]][kUpdateEps].item<double>();
    at::Tensor v = state[i].view(o.sizes());
    v.lerp_(o.square().to(v.scalar_type()), 1.0 - beta);
    o.div_(v.sqrt().to(o.scalar_type()) + eps);
    const at::Tensor norm = at::linalg_vector_norm(o, 2, at::IntArrayRef{-2, -1}, true);
    o.mul_(std::sqrt(static_cast<double>(std::min(o.size(-2), o.size(-1)))) / norm.clamp_min(eps));
  }
}

TORCH_LIBRARY(adamuon, m) {
  m.def("orthogonalize_(Tensor(a!) matrices, Tensor hyper, int[] groups, str spec) -> ()");
  m.def("refine_(Tensor(a!)[] matrices, Tensor(b!)[] state, Tensor hyper, int[] groups) -> ()");
}

TORCH_LIBRARY_IMPL(adamuon, CompositeExplicitAutograd, m) {
  m.impl("orthogonalize_", &orthogonalize_);
  m.impl("refine_", &refine_);
}

void register_it() {
  muon::Algorithm algorithm;
  algorithm.name = "adamuon";
  algorithm.state = {
      {"momentum_buffer", muon::StateSlot::Kind::LikeParam},
      {"second_momentum", muon::StateSlot::Kind::LikeParam}};
  algorithm.options = {{"update_beta", 0.95}, {"update_eps", 1e-8}};
  algorithm.orthogonalize = "adamuon::orthogonalize_";
  algorithm.refine = "adamuon::refine_";
  muon::register_algorithm(algorithm);
}

} // namespace adamuon

namespace {

muon::Muon make_optimizer(const gpt::Arguments& args, gpt::Gpt& model) {
  auto groups = muon::group_parameters(*model);
  for (auto& group : groups) {
    auto& options = static_cast<muon::MuonOptions&>(group.options());
    if (options.algorithm() == "muon") {
      options.algorithm("adamuon");
    }
  }
  return muon::Muon(groups, muon::MuonOptions(args.lr).weight_decay(0.1));
}

// Trains with a constant rate; half-way, everything goes through a file into a new optimizer.
void train(const gpt::Arguments& args, const gpt::Corpus& corpus, std::ofstream& log) {
  gpt::Gpt model(gpt::Sizes{corpus.vocabulary, args.context, args.layers, args.width, args.heads});
  const auto seed = static_cast<std::uint64_t>(args.seed);
  model->initialize(seed);
  auto optimizer = make_optimizer(args, model);
  gpt::Sampler sampler(corpus.train, args.batch, args.context, seed);
  const gpt::Progress progress(args.steps, args.batch * args.context);
  for (std::int64_t step = 1; step <= args.steps; ++step) {
    const auto [inputs, targets] = sampler.next();
    const auto loss = model->loss(inputs, targets);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step == args.steps / 2) {
      std::stringstream file;
      torch::save(optimizer, file);
      optimizer = make_optimizer(args, model);
      torch::load(optimizer, file);
    }
    const auto train_loss = loss.item<double>();
    log << nlohmann::json{{"step", step}, {"train_loss", train_loss}} << '\n' << std::flush;
    progress.update(step, train_loss, train_loss);
  }
}

} // namespace

int main(int argc, char** argv) {
  try {
    const auto args = gpt::parse_arguments(argc, argv);
    at::set_num_threads(static_cast<int>(args.threads));
    adamuon::register_it();
    std::filesystem::create_directories(std::filesystem::absolute(args.out).parent_path());
    std::ofstream log(args.out);
    train(args, gpt::Corpus(args.corpus), log);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "custom_algorithm: %s\n", error.what());
    return 1;
  }
}
