#include "chorale/io/safetensors.h"

#include <algorithm>
#include <unordered_set>

#include "chorale/base/crc32c.h"
#include "chorale/base/did_you_mean.h"
#include "chorale/io/safetensors_header.h"
#include "chorale/io/tensor_bytes.h"
#include "chorale/json/json.h"

namespace chorale::io {
namespace {

// The header, and the tensors in the order of their data: those with the largest elements first, so that every tensor
// is aligned without the holes that the format forbids.
struct Plan {
  std::string header;
  std::vector<size_t> order;
};

Plan plan(const NamedTensors& tensors, const Metadata& metadata) {
  std::unordered_set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    CHORALE_CHECK(name != "__metadata__", "[save] a tensor cannot be called __metadata__");
    CHORALE_CHECK(names.insert(name).second, "[save] there are two tensors called \"", name, "\"");
    CHORALE_CHECK(tensor.defined(), "[save] tensor \"", name, "\" is undefined");
    CHORALE_CHECK(find_safetensors_dtype(tensor.dtype()), "[save] tensor \"", name, "\": safetensors has no dtype for ",
                  tensor.dtype(), "; save real and imaginary parts, or .npy");
  }
  std::vector<size_t> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return tensors[a].second.elem_bytes() > tensors[b].second.elem_bytes(); });
  std::vector<size_t> begin(tensors.size());
  size_t at = 0;
  Plan result;
  for (const size_t i : order) {
    const Tensor& tensor = tensors[i].second;
    begin[i] = at;
    at += static_cast<size_t>(tensor.elems()) * tensor.elem_bytes();
  }

  // Members in the caller's order, which loading then keeps.
  std::string text = "{";
  const auto separate = [&] {
    if (text.size() > 1) text += ',';
  };
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (text.back() != '{') text += ',';
      text += json::quote(key) + ':' + json::quote(value);
    }
    text += '}';
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    separate();
    text += json::quote(name) + ":{\"dtype\":\"" + std::string(find_safetensors_dtype(tensor.dtype())->name) +
            "\",\"shape\":[";
    for (size_t d = 0; d < tensor.sizes().size(); ++d) text += (d ? "," : "") + std::to_string(tensor.sizes()[d]);
    const size_t end = begin[i] + static_cast<size_t>(tensor.elems()) * tensor.elem_bytes();
    text += "],\"data_offsets\":[" + std::to_string(begin[i]) + ',' + std::to_string(end) + "]}";
  }
  text += '}';
  result.order = std::move(order);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data begins at a multiple of 8
  result.header = std::move(text);
  return result;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path, bool is_read)
    : file_(MappedFile::open(path, is_read)), header_(parse_safetensors(path.string(), file_->bytes())) {
  for (size_t i = 0; i < header_.entries.size(); ++i) by_name_.emplace(header_.entries[i].name, i);
}

const SafetensorsEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    std::vector<std::string> names;
    for (const SafetensorsEntry& entry : entries()) names.push_back(entry.name);
    detail::raise<InvalidArgument>("[load] ", file_->path(), " has no tensor \"", name, "\"",
                                   did_you_mean(name, names));
  }
  return entries()[found->second];
}

Tensor SafetensorsFile::load(const std::string& name) const {
  const SafetensorsEntry& stored = entry(name);
  const std::optional<DType> dtype = find_safetensors_dtype(stored.dtype)->dtype;
  CHORALE_CHECK(dtype, "[load] ", file_->path(), ": tensor \"", stored.name, "\" has dtype ", stored.dtype,
                ", which tensors cannot have; convert the file first");
  return tensor_in_file(file_, header_.data_begin + stored.begin, stored.sizes, contiguous_strides(stored.sizes),
                        *dtype);
}

uint32_t SafetensorsFile::read(const std::string& name, size_t begin, std::span<std::byte> into, bool sum) const {
  const SafetensorsEntry& stored = entry(name);
  CHORALE_CHECK(begin <= stored.end - stored.begin && into.size() <= stored.end - stored.begin - begin, "[load] ",
                file_->path(), ": tensor \"", name, "\" has ", stored.end - stored.begin, " bytes; there are no ",
                into.size(), " from ", begin, " on");
  constexpr size_t kBlock = size_t{256} << 10;  // in the cache of a core when it is summed
  size_t from = header_.data_begin + stored.begin + begin;
  uint32_t crc = 0;
  for (size_t at = 0; at < into.size(); at += kBlock) {
    const auto block = into.subspan(at, std::min(kBlock, into.size() - at));
    file_->read(from + at, block);
    if (sum) crc = crc32c(block, crc);
  }
  return crc;
}

namespace {

// Calls write(file, i, bytes of tensor i) for each of them, in the order of the file.
template <class Write>
void save_by(const std::filesystem::path& path, const NamedTensors& tensors, const Metadata& metadata,
             const std::filesystem::path& spare, const Write& write) {
  const Plan made = plan(tensors, metadata);
  AtomicFile file(path, spare);
  const uint64_t length = made.header.size();
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(made.header);
  for (const size_t i : made.order) write(file, i, bytes_of(contiguous_for_file("[save] a tensor", tensors[i].second)));
  file.commit();
}

}  // namespace

void save(const std::filesystem::path& path, const NamedTensors& tensors, const Metadata& metadata) {
  save_by(path, tensors, metadata, {},
          [](AtomicFile& file, size_t, std::span<const std::byte> bytes) { file.write(bytes); });
}

std::vector<uint32_t> save_with_checksums(const std::filesystem::path& path, const NamedTensors& tensors,
                                          const Metadata& metadata, const std::filesystem::path& spare) {
  std::vector<uint32_t> checksums(tensors.size());
  save_by(path, tensors, metadata, spare, [&](AtomicFile& file, size_t i, std::span<const std::byte> bytes) {
    constexpr size_t kBlock = size_t{256} << 10;  // in the cache of a core when the system copies it
    for (size_t at = 0; at < bytes.size(); at += kBlock) {
      const auto block = bytes.subspan(at, std::min(kBlock, bytes.size() - at));
      checksums[i] = crc32c(block, checksums[i]);
      file.write(block);
    }
  });
  return checksums;
}

}  // namespace chorale::io
