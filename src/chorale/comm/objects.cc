#include "chorale/comm/objects.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/tensor/device_copy.h"

namespace chorale::comm {
namespace {

// Bytes as a tensor. A value that was received is read through its own text again.
Tensor as_bytes(const std::string& text) {
  return Tensor::from(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()),
                      {static_cast<int64_t>(text.size())});
}
Value as_value(const Tensor& bytes) {
  return decode({reinterpret_cast<const char*>(bytes.raw()), static_cast<size_t>(bytes.elems())});
}
Tensor room_for(int64_t bytes) { return Tensor::empty({bytes}, DType::kU8); }

std::vector<int64_t> gather_sizes(const Group& group, int64_t own) {
  std::vector<int64_t> sizes(static_cast<size_t>(group.size()));
  group.all_gather_into(std::span(sizes), std::span<const int64_t>(&own, 1)).wait();
  return sizes;
}

}  // namespace

std::vector<Value> all_gather_object(const Group& group, const Value& value) {
  if (!group.is_member()) return {};
  const Tensor own = as_bytes(encode(value));
  std::vector<Tensor> texts;
  for (int64_t size : gather_sizes(group, own.elems())) texts.push_back(room_for(size));
  group.all_gather(texts, own).wait();
  std::vector<Value> values;
  values.reserve(texts.size());
  for (const Tensor& text : texts) values.push_back(as_value(text));
  return values;
}

std::vector<Value> gather_object(const Group& group, const Value& value, int root) {
  if (!group.is_member()) return {};
  const Tensor own = as_bytes(encode(value));
  const auto sizes = gather_sizes(group, own.elems());
  // Chunks of a gather are equal: padded to the longest, and cut again.
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  const Tensor padded = room_for(longest);
  std::fill_n(padded.data<uint8_t>(), longest, uint8_t{0});
  std::copy_n(own.data<uint8_t>(), own.elems(), padded.data<uint8_t>());
  std::vector<Tensor> texts;
  const bool is_root = group.global_rank(group.rank()) == root;
  for (size_t r = 0; r < sizes.size() && is_root; ++r) texts.push_back(room_for(longest));
  group.gather(texts, padded, root).wait();
  std::vector<Value> values;
  for (size_t r = 0; r < texts.size(); ++r) values.push_back(as_value(texts[r].view_as({sizes[r]}, {1}, 0)));
  return values;
}

void broadcast_object_list(const Group& group, std::vector<Value>& values, int root, Device device) {
  if (!group.is_member()) return;
  const bool is_root = group.global_rank(group.rank()) == root;
  const std::string text = is_root ? encode(List(values.begin(), values.end())) : std::string();
  std::vector<int64_t> head{static_cast<int64_t>(values.size()), static_cast<int64_t>(text.size())};
  const int64_t length = head[0];
  group.broadcast(std::span(head), root).wait();
  Tensor bytes = is_root && device == kCpu ? as_bytes(text) : Tensor::empty({head[1]}, DType::kU8, device);
  if (is_root && device != kCpu) copy_between_devices(as_bytes(text), bytes);
  bytes = on_host(bytes);  // ranks may name different devices: only the host's memory is the same for all
  group.broadcast(bytes, root).wait();
  CHORALE_CHECK(length == head[0], "[broadcast_object_list] this rank passes ", length, " values, the root ", head[0]);
  if (!is_root) values = as_value(bytes).as<List>();
}

void scatter_object_list(const Group& group, std::vector<Value>& output, const std::vector<Value>& inputs, int root) {
  if (!group.is_member()) return;
  CHORALE_CHECK(!output.empty(), "[scatter_object_list] the output list needs at least one slot");
  const auto size = static_cast<size_t>(group.size());
  const bool is_root = group.global_rank(group.rank()) == root;
  std::vector<std::string> texts;
  if (is_root) {
    CHORALE_CHECK(inputs.size() == size, "[scatter_object_list] the root must pass one value per rank, ", size,
                  ", not ", inputs.size());
    for (const Value& value : inputs) texts.push_back(encode(value));
  }
  std::vector<int64_t> sizes(size);
  for (size_t r = 0; r < texts.size(); ++r) sizes[r] = static_cast<int64_t>(texts[r].size());
  group.broadcast(std::span(sizes), root).wait();
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  std::vector<Tensor> padded;
  for (std::string& text : texts) {
    text.resize(static_cast<size_t>(longest));
    padded.push_back(as_bytes(text));
  }
  const Tensor own = room_for(longest);
  group.scatter(own, padded, root).wait();
  output[0] = as_value(own.view_as({sizes[static_cast<size_t>(group.rank())]}, {1}, 0));
}

}  // namespace chorale::comm
