// DistributedDataParallel: buffers, which every rank has as one of them does.
#include <string>
#include <unordered_set>
#include <vector>

#include "chorale/parallel/ddp.h"

namespace chorale::parallel {

namespace {
// All buffers of a module, re-read from its members: users assign new ones.
struct BufferVisitor final : nn::MemberVisitor {
  BufferVisitor(std::vector<Tensor>& found_buffers, const std::unordered_set<std::string>& ignored_names)
      : found(found_buffers), ignored(ignored_names) {}
  std::vector<Tensor>& found;
  const std::unordered_set<std::string>& ignored;
  std::string path;  // with a dot behind it, unless empty

  void parameter(const std::string&, nn::Parameter&) override {}
  void buffer(const std::string& name, nn::Buffer& member) override {
    if (ignored.empty() || !ignored.contains(path + name)) found.push_back(member);
  }
  void module(const std::string& name, nn::Module& member) override {
    const size_t length = path.size();
    if (!ignored.empty()) path += name + ".";
    member.visit_members(*this);
    path.resize(length);
  }
};
}  // namespace

const std::vector<Tensor>& DataParallelBase::buffers() {
  buffers_.clear();
  BufferVisitor visitor(buffers_, ignored_);
  module_->visit_members(visitor);
  return buffers_;
}

void DataParallelBase::sync_buffers() {
  if (buffer_hook_.run) {
    if (buffer_hook_.place == BufferHook::Place::kBeforeForward) run_buffer_hook();
    return;
  }
  int root = group().global_rank(0);
  if (const Join* join = current_join(); join && join->options().enabled) root = agree_on_live_rank(true);
  broadcast_buffers(root);
}

// The highest rank that still has inputs: rank 0 may have none.
int DataParallelBase::agree_on_live_rank(bool alive) {
  int32_t rank = alive ? group().rank() : -1;
  group().all_reduce(std::span(&rank, 1), Reduce::kMax).wait();
  return group().global_rank(rank);
}

void DataParallelBase::broadcast_buffers(int root) {
  std::vector<comm::Work> works;
  for (const Tensor& buffer : buffers_) works.push_back(group().broadcast(buffer, root));
  for (const comm::Work& work : works) work.wait();
}

void DataParallelBase::run_buffer_hook() {
  NamedTensors named = module_->named_buffers();
  std::erase_if(named, [&](const auto& entry) { return ignored_.contains(entry.first); });
  for (comm::Future& future : buffer_hook_.run(group(), named)) buffer_futures_.push_back(std::move(future));
}

}  // namespace chorale::parallel
