#include "chorale/train/exchange.h"

#include "chorale/api/api.h"
#include "chorale/comm/objects.h"

namespace chorale::train {
namespace {

// Names, dtypes and shapes; the bytes follow one by one, which a value, bounded as it is, might not hold.
comm::Value outline(const NamedTensors& tensors) {
  comm::List rows;
  for (const auto& [name, tensor] : tensors) {
    comm::List sizes;
    for (const int64_t size : tensor.sizes()) sizes.emplace_back(size);
    rows.emplace_back(
        comm::List{comm::Value(name), comm::Value(static_cast<int64_t>(tensor.dtype())), comm::Value(sizes)});
  }
  return {rows};
}
NamedTensors allocate(const comm::Value& outline) {
  NamedTensors tensors;
  for (const comm::Value& row : outline.as<comm::List>()) {
    const auto& parts = row.as<comm::List>();
    Shape sizes;
    for (const comm::Value& size : parts[2].as<comm::List>()) sizes.push_back(size.as<int64_t>());
    tensors.emplace_back(parts[0].as<std::string>(), empty(sizes, static_cast<DType>(parts[1].as<int64_t>())));
  }
  return tensors;
}
// Files are mapped read-only, and peers reduce in place: what travels is our own.
Tensor own(const Tensor& tensor) { return clone(tensor); }

}  // namespace

NamedTensors broadcast_tensors(const comm::Group& group, const NamedTensors& tensors) {
  std::vector<comm::Value> head(1);
  if (group.rank() == 0) head[0] = outline(tensors);
  comm::broadcast_object_list(group, head, 0);
  NamedTensors result;
  if (group.rank() == 0) {
    for (const auto& [name, tensor] : tensors) result.emplace_back(name, own(tensor));
  } else {
    result = allocate(head[0]);
  }
  for (const auto& [name, tensor] : result) group.broadcast(tensor, 0).wait();
  return result;
}

std::vector<NamedTensors> gather_tensors(const comm::Group& group, const NamedTensors& tensors) {
  const std::vector<comm::Value> outlines = comm::gather_object(group, outline(tensors));
  std::vector<NamedTensors> all;
  if (group.rank() != 0) {
    for (const auto& [name, tensor] : tensors) group.send(tensor, 0);
    return all;
  }
  all.push_back(tensors);
  for (int rank = 1; rank < group.size(); ++rank) {
    all.push_back(allocate(outlines[static_cast<size_t>(rank)]));
    for (const auto& [name, tensor] : all.back()) group.recv(tensor, rank);
  }
  return all;
}

NamedTensors scatter_tensors(const comm::Group& group, const std::vector<NamedTensors>& tensors) {
  std::vector<comm::Value> outlines, head(1);
  if (group.rank() == 0) {
    for (const NamedTensors& part : tensors) outlines.push_back(outline(part));
  }
  comm::scatter_object_list(group, head, outlines);
  if (group.rank() == 0) {
    for (int rank = 1; rank < group.size(); ++rank) {
      for (const auto& [name, tensor] : tensors[static_cast<size_t>(rank)]) group.send(own(tensor), rank);
    }
    return tensors[0];
  }
  NamedTensors result = allocate(head[0]);
  for (const auto& [name, tensor] : result) group.recv(tensor, 0);
  return result;
}

}  // namespace chorale::train
