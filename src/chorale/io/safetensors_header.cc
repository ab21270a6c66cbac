#include "chorale/io/safetensors_header.h"

#include <algorithm>
#include <cstring>

#include "chorale/io/safetensors.h"
#include "chorale/json/json.h"

// The format: eight bytes, the length of the header, little-endian; the header, a JSON object that may be followed by
// spaces; the data. The object has a member per tensor, {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, and
// maybe "__metadata__", an object of strings.

namespace chorale::io {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxDepth = 3;  // the header, a tensor, its shape

constexpr SafetensorsDType kDTypes[] = {
    {"F32", 4, DType::kF32}, {"F16", 2, DType::kF16}, {"BF16", 2, DType::kBF16}, {"F64", 8, DType::kF64},
    {"I64", 8, DType::kI64}, {"I32", 4, DType::kI32}, {"I16", 2, DType::kI16},   {"I8", 1, DType::kI8},
    {"U8", 1, DType::kU8},   {"C64", 8, DType::kC64}, {"BOOL", 1, DType::kBool}, {"U16", 2, {}},
    {"U32", 4, {}},          {"U64", 8, {}},          {"F8_E4M3", 1, {}},        {"F8_E5M2", 1, {}},
    {"F8_E8M0", 1, {}},
};

// The bytes of a tensor whose shape may be anything.
size_t bytes_of(const std::string& tensor, const Shape& sizes, size_t elem_bytes) {
  size_t bytes = 0;
  try {
    const auto elems = static_cast<size_t>(count_elems(sizes));
    CHORALE_CHECK(!__builtin_mul_overflow(elems, elem_bytes, &bytes), "shape ", sizes, " has too many bytes");
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(concat("[safetensors] ", tensor, ": ", error.what()));
  }
  return bytes;
}

SafetensorsEntry parse_entry(std::string_view what, const std::string& name, const json::Value& value) {
  SafetensorsEntry entry{.name = name, .dtype = {}, .sizes = {}};
  const std::string tensor = concat(what, ": tensor \"", name, "\"");
  const json::Value *dtype = nullptr, *shape = nullptr, *offsets = nullptr;
  for (const auto& [key, member] : value.object(tensor)) {
    if (key == "dtype") {
      dtype = &member;
    } else if (key == "shape") {
      shape = &member;
    } else if (key == "data_offsets") {
      offsets = &member;
    } else {
      detail::raise<InvalidArgument>("[safetensors] ", what, ": tensor \"", name, "\" has an unknown member \"", key,
                                     "\"; expected dtype, shape and data_offsets");
    }
  }
  CHORALE_CHECK(dtype && shape && offsets, "[safetensors] ", what, ": tensor \"", name,
                "\" needs dtype, shape and data_offsets");

  entry.dtype = dtype->string(tensor + ": dtype");
  const SafetensorsDType* row = find_safetensors_dtype(entry.dtype);
  CHORALE_CHECK(row, "[safetensors] ", what, ": tensor \"", name, "\" has the unknown dtype \"", entry.dtype, "\"");
  const json::Array& sizes = shape->array(tensor + ": shape");
  CHORALE_CHECK(sizes.size() <= kMaxDims, "[safetensors] ", what, ": tensor \"", name, "\" has ", sizes.size(),
                " dimensions; at most ", kMaxDims, " are possible");
  for (const json::Value& size : sizes) entry.sizes.push_back(size.size(tensor + ": shape"));
  const json::Array& range = offsets->array(tensor + ": data_offsets");
  CHORALE_CHECK(range.size() == 2, "[safetensors] ", what, ": tensor \"", name,
                "\" should have two data_offsets, but has ", range.size());
  entry.begin = static_cast<size_t>(range[0].size(tensor + ": data_offsets"));
  entry.end = static_cast<size_t>(range[1].size(tensor + ": data_offsets"));
  const size_t bytes = bytes_of(tensor, entry.sizes, row->bytes);
  CHORALE_CHECK(entry.begin <= entry.end && entry.end - entry.begin == bytes, "[safetensors] ", what, ": tensor \"",
                name, "\" of dtype ", entry.dtype, " and shape ", entry.sizes, " needs ", bytes,
                " bytes, but has the data_offsets ", entry.begin, " and ", entry.end);
  return entry;
}

// Every byte of the data belongs to one tensor.
void check_cover(std::string_view what, const std::vector<SafetensorsEntry>& entries, size_t data_bytes) {
  std::vector<const SafetensorsEntry*> order;
  order.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);  // empty tensors before what follows them
  });
  size_t at = 0;
  for (const SafetensorsEntry* entry : order) {
    CHORALE_CHECK(entry->begin == at, "[safetensors] ", what, ": tensor \"", entry->name, "\" begins at byte ",
                  entry->begin, " of the data, but the one before it ends at ", at, ": ",
                  entry->begin < at ? "they overlap" : "there is a hole");
    at = entry->end;
  }
  CHORALE_CHECK(at == data_bytes, "[safetensors] ", what, " has ", data_bytes, " bytes of data, but its tensors need ",
                at, at > data_bytes ? ": it was cut off" : "");
}

}  // namespace

const SafetensorsDType* find_safetensors_dtype(std::string_view name) {
  const auto* row = std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& r) { return r.name == name; });
  return row == std::end(kDTypes) ? nullptr : row;
}

const SafetensorsDType* find_safetensors_dtype(DType dtype) {
  const auto* row =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& r) { return r.dtype == dtype; });
  return row == std::end(kDTypes) ? nullptr : row;
}

SafetensorsHeader parse_safetensors(std::string_view what, std::span<const std::byte> file) {
  CHORALE_CHECK(file.size() >= kLengthBytes, "[safetensors] ", what, " has ", file.size(),
                " bytes; a file has at least 8, the length of its header");
  uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  CHORALE_CHECK(length <= kMaxHeaderBytes, "[safetensors] ", what, " asks for a header of ", length, " bytes; at most ",
                kMaxHeaderBytes, " are read. Is this a safetensors file?");
  CHORALE_CHECK(length <= file.size() - kLengthBytes, "[safetensors] ", what, " asks for a header of ", length,
                " bytes, but only ", file.size() - kLengthBytes, " follow: it was cut off, or is another format");
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  CHORALE_CHECK(text.starts_with('{'), "[safetensors] ", what, ": the header should begin with '{'");

  SafetensorsHeader header;
  header.data_begin = kLengthBytes + length;
  const json::Value root = json::parse(what, text, {.bytes = kMaxHeaderBytes, .depth = kMaxDepth});
  for (const auto& [key, value] : root.object(what)) {
    if (key == "__metadata__") {
      const std::string notes = concat(what, ": ", key);
      for (const auto& [name, note] : value.object(notes))
        header.metadata.emplace(name, note.string(concat(notes, ": ", name)));
    } else {
      header.entries.push_back(parse_entry(what, key, value));
    }
  }
  check_cover(what, header.entries, file.size() - header.data_begin);
  return header;
}

}  // namespace chorale::io
