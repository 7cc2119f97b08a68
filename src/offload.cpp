#include "offload.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace muon::detail {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

at::Tensor on_device(const at::Tensor& host, c10::Device device) {
  if (!host.defined() || host.dim() == 0) {
    return host;
  }
  const at::Tensor copy = at::empty(host.sizes(), host.options().device(device));
  return copy.copy_(host, /*non_blocking=*/true);
}

void write_back(const at::Tensor& host, const at::Tensor& device) {
  if (host.defined() && host.dim() > 0) {
    host.copy_(device, /*non_blocking=*/true);
  }
}

template <typename Visit>
void for_each_tensor(const std::vector<StateView>& views, const Visit& visit) {
  for (const StateView& view : views) {
    for (const at::Tensor& tensor : {view.plain, view.blocks.codes, view.blocks.scales}) {
      if (tensor.defined() && tensor.dim() > 0) {
        visit(tensor);
      }
    }
  }
}

} // namespace

StateStream::StateStream(c10::Device device) : device_(device) {
  if (!device.is_cpu()) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }
}

FetchedState StateStream::fetch(const std::vector<StateView>& host) const {
  const c10::OptionalStreamGuard guard(stream_);
  FetchedState state;
  state.host = host;
  for (const StateView& view : host) {
    state.device.push_back(
        {on_device(view.plain, device_),
         {view.blocks.format, on_device(view.blocks.codes, device_),
          on_device(view.blocks.scales, device_)}});
  }
  if (stream_) {
    state.ready.emplace(device_.type()).record(*stream_);
  }
  return state;
}

void StateStream::wait(const FetchedState& state) const {
  if (!stream_) {
    return;
  }
  const c10::Stream current = current_stream(device_);
  state.ready->block(current);
  for_each_tensor(state.device, [&](const at::Tensor& tensor) { tensor.record_stream(current); });
}

void StateStream::store(const FetchedState& state) const {
  if (stream_) {
    c10::Event done(device_.type());
    done.record(current_stream(device_));
    done.block(*stream_);
  }
  const c10::OptionalStreamGuard guard(stream_);
  for (std::size_t i = 0; i < state.host.size(); ++i) {
    write_back(state.host[i].plain, state.device[i].plain);
    write_back(state.host[i].blocks.codes, state.device[i].blocks.codes);
    write_back(state.host[i].blocks.scales, state.device[i].blocks.scales);
  }
}

void StateStream::finish() const {
  if (stream_) {
    stream_->synchronize();
  }
}

StateStream& StateStreams::on(c10::Device device) {
  return streams_.try_emplace(device.str(), device).first->second;
}

void StateStreams::finish() const {
  for (const auto& [device, stream] : streams_) {
    stream.finish();
  }
}

OffloadedViews::OffloadedViews(const Step& step, const std::vector<ActivePiece>& active)
    : views_(make_views(step, active)) {
  if (active.empty() || !step.plan.spec_of(active.front().item->param).offload) {
    return;
  }
  stream_ = &step.offload.on(views_.params.front().device());
  std::vector<StateView> state = views_.state;
  state.insert(state.end(), views_.remainders.begin(), views_.remainders.end());
  fetched_ = stream_->fetch(state);
}

const ChunkViews& OffloadedViews::use() {
  if (stream_ != nullptr) {
    stream_->wait(fetched_);
    const auto slots = static_cast<std::ptrdiff_t>(views_.state.size());
    views_.state.assign(fetched_.device.begin(), fetched_.device.begin() + slots);
    views_.remainders.assign(fetched_.device.begin() + slots, fetched_.device.end());
  }
  return views_;
}

void OffloadedViews::store() {
  if (stream_ != nullptr) {
    stream_->store(fetched_);
  }
}

} // namespace muon::detail
