#include "chorale/io/idx.h"

#include <array>
#include <cstring>
#include <optional>

#include "chorale/io/gzip.h"
#include "chorale/io/tensor_bytes.h"

// Four bytes, 0 0 TYPE RANK; RANK sizes of four bytes, big-endian; the elements.

namespace chorale::io {
namespace {

constexpr size_t kMagicBytes = 4, kSizeBytes = 4;

std::optional<DType> dtype_of_code(std::byte code) {
  switch (static_cast<uint8_t>(code)) {
    case 0x08:
      return DType::kU8;
    case 0x09:
      return DType::kI8;
    case 0x0B:
      return DType::kI16;
    case 0x0C:
      return DType::kI32;
    case 0x0D:
      return DType::kF32;
    case 0x0E:
      return DType::kF64;
    default:
      return {};
  }
}

// Plain bytes, read as GzipReader reads packed ones.
class PlainReader {
 public:
  PlainReader(std::string what, std::span<const std::byte> bytes) : what_(std::move(what)), left_(bytes) {}
  void read(std::span<std::byte> out) {
    CHORALE_CHECK(out.size() <= left_.size(), "[idx] ", what_, " ends ", out.size() - left_.size(), " bytes too early");
    if (!out.empty()) std::memcpy(out.data(), left_.data(), out.size());
    left_ = left_.subspan(out.size());
  }
  void finish() { CHORALE_CHECK(left_.empty(), "[idx] ", what_, " has ", left_.size(), " bytes behind its end"); }
  size_t most_bytes() const { return left_.size(); }

 private:
  const std::string what_;
  std::span<const std::byte> left_;
};

template <class Reader>
Tensor parse(const std::string& what, Reader&& reader) {
  std::array<std::byte, kMagicBytes> magic{};
  reader.read(magic);
  const std::optional<DType> dtype = dtype_of_code(magic[2]);
  const auto dims = static_cast<size_t>(magic[3]);
  CHORALE_CHECK(magic[0] == std::byte{0} && magic[1] == std::byte{0} && dtype, "[idx] ", what,
                " is not an IDX file: it should begin with 0, 0 and the code of a type");
  CHORALE_CHECK(dims <= kMaxDims, "[idx] ", what, " has ", dims, " dimensions; at most ", kMaxDims, " are possible");
  Shape sizes;
  for (size_t d = 0; d < dims; ++d) {
    std::array<std::byte, kSizeBytes> size{};
    reader.read(size);
    int64_t value = 0;
    for (const std::byte byte : size) value = value << 8 | static_cast<int64_t>(byte);
    sizes.push_back(value);
  }
  const size_t bytes = static_cast<size_t>(count_elems(sizes)) * size_of(*dtype);
  // This is checked before memory is asked for.
  CHORALE_CHECK(bytes <= reader.most_bytes(), "[idx] ", what, " cannot hold ", sizes, " elements of ", *dtype,
                ": it was cut off, or its sizes are wrong");
  Tensor result = Tensor::empty(sizes, *dtype);
  reader.read({static_cast<std::byte*>(result.raw()), bytes});
  reader.finish();
  swap_bytes(result);
  return result;
}

}  // namespace

Tensor parse_idx(const std::string& what, std::span<const std::byte> bytes) {
  return is_gzip(bytes) ? parse(what, GzipReader(what, bytes)) : parse(what, PlainReader(what, bytes));
}

Tensor load_idx(const std::filesystem::path& path) { return parse_idx(path.string(), MappedFile::open(path)->bytes()); }

}  // namespace chorale::io
