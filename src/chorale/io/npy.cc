#include "chorale/io/npy.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

#include "chorale/io/tensor_bytes.h"

// Six bytes of magic, two of version, the length of the header (two bytes in version 1, else four), little-endian; the
// header, a Python dictionary such as {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), } in Latin-1 or, in
// version 3, UTF-8, filled up with spaces and ended by a newline; the elements.

namespace chorale::io {
namespace {

constexpr std::string_view kNpyMagic = "\x93NUMPY";
constexpr size_t kMaxNpyHeaderBytes = 10'000;  // as NumPy itself
constexpr size_t kAlignment = 64;              // of the elements in the file

struct Kind {
  std::string_view code;  // without byte order
  DType dtype;
};
constexpr Kind kKinds[] = {{"b1", DType::kBool}, {"u1", DType::kU8},  {"i1", DType::kI8},  {"i2", DType::kI16},
                           {"i4", DType::kI32},  {"i8", DType::kI64}, {"f2", DType::kF16}, {"V2", DType::kBF16},
                           {"f4", DType::kF32},  {"f8", DType::kF64}, {"c8", DType::kC64}, {"c16", DType::kC128}};

// Reads the one kind of dictionary that a header may be.
class HeaderParser {
 public:
  HeaderParser(const std::string& what, std::string_view text) : what_(what), text_(text) {}

  void parse(NpyHeader& header) {
    bool descr = false, order = false, shape = false;
    expect('{');
    while (!next_is('}')) {
      const std::string_view key = string();
      expect(':');
      const auto first_time = [&](bool& seen) {
        check(!seen, "a key twice");
        seen = true;
      };
      if (key == "descr") {
        first_time(descr);
        parse_descr(header);
      } else if (key == "fortran_order") {
        first_time(order);
        header.fortran_order = boolean();
      } else if (key == "shape") {
        first_time(shape);
        parse_shape(header);
      } else {
        check(false, "an unknown key");
      }
      if (!next_is(',')) {
        check(next_is('}'), "neither ',' nor '}' behind a value");
        break;
      }
      expect(',');
    }
    expect('}');
    skip_spaces();
    check(at_ == text_.size(), "something behind the dictionary");
    check(descr && order && shape, "not all of 'descr', 'fortran_order' and 'shape'");
  }

 private:
  void check(bool condition, const char* found) const {
    CHORALE_CHECK(condition, "[npy] ", what_, " has a header that cannot be understood: there is ", found, " at byte ",
                  at_, " of it");
  }
  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  bool next_is(char c) {
    skip_spaces();
    return at_ < text_.size() && text_[at_] == c;
  }
  void expect(char c) {
    check(next_is(c), "another character than expected");
    ++at_;
  }
  std::string_view string() {
    skip_spaces();
    check(next_is('\'') || next_is('"'), "no quoted text");
    const char quote = text_[at_++];
    const size_t end = text_.find(quote, at_);
    check(end != std::string_view::npos, "a text without its end");
    const std::string_view result = text_.substr(at_, end - at_);
    check(result.find('\\') == std::string_view::npos, "a backslash");
    at_ = end + 1;
    return result;
  }
  bool boolean() {
    skip_spaces();
    for (const auto& [word, value] : {std::pair<std::string_view, bool>("True", true), {"False", false}}) {
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return value;
      }
    }
    check(false, "neither True nor False");
    return false;
  }
  void parse_descr(NpyHeader& header) {
    CHORALE_CHECK(!next_is('['), "[npy] ", what_, " holds records; only arrays of one type can be read");
    std::string_view descr = string();
    const std::string_view whole = descr;
    if (descr.starts_with('>')) header.big_endian = true;
    if (!descr.empty() && std::string_view("<>|=").find(descr[0]) != std::string_view::npos) descr.remove_prefix(1);
    const auto* kind =
        std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& row) { return row.code == descr; });
    CHORALE_CHECK(kind != std::end(kKinds), "[npy] ", what_, " holds elements of type '", whole.substr(0, 20),
                  "', which tensors cannot have; convert it first, say with astype('i8')");
    header.dtype = kind->dtype;
  }
  void parse_shape(NpyHeader& header) {
    expect('(');
    while (!next_is(')')) {
      CHORALE_CHECK(header.sizes.size() < kMaxDims, "[npy] ", what_, " has more than ", kMaxDims, " dimensions");
      skip_spaces();
      int64_t size = 0;
      const char* end = text_.data() + text_.size();
      const auto [stop, error] = std::from_chars(text_.data() + at_, end, size);
      check(error == std::errc() && size >= 0, "no size of a dimension");
      at_ = static_cast<size_t>(stop - text_.data());
      if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // as Python 2 wrote long integers
      header.sizes.push_back(size);
      if (!next_is(',')) break;
      expect(',');
    }
    expect(')');
  }

  const std::string& what_;
  const std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

NpyHeader parse_npy(const std::string& what, std::string_view file) {
  CHORALE_CHECK(file.starts_with(kNpyMagic), "[npy] ", what, " is not a .npy file: it should begin with \\x93NUMPY");
  CHORALE_CHECK(file.size() >= 12, "[npy] ", what, " was cut off in its header");
  const int major = file[6], minor = file[7];
  CHORALE_CHECK(major >= 1 && major <= 3 && minor == 0, "[npy] ", what, " has version ", major, ".", minor,
                "; versions 1.0 to 3.0 are known");
  const size_t length_bytes = major == 1 ? 2 : 4;
  uint32_t length = 0;
  std::memcpy(&length, file.data() + 8, length_bytes);
  CHORALE_CHECK(length <= kMaxNpyHeaderBytes, "[npy] ", what, " asks for a header of ", length, " bytes; at most ",
                kMaxNpyHeaderBytes, " are read");
  NpyHeader header;
  header.data_begin = 8 + length_bytes + length;
  CHORALE_CHECK(header.data_begin <= file.size(), "[npy] ", what, " was cut off in its header");
  HeaderParser(what, file.substr(8 + length_bytes, length)).parse(header);
  const size_t wanted = static_cast<size_t>(count_elems(header.sizes)) * size_of(header.dtype);
  const size_t found = file.size() - header.data_begin;
  CHORALE_CHECK(wanted == found, "[npy] ", what, " of shape ", header.sizes, " and dtype ", header.dtype, " needs ",
                wanted, " bytes of elements, but has ", found);
  return header;
}

Tensor load_npy(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  const NpyHeader header = parse_npy(path.string(), file->text());
  Strides strides = contiguous_strides(header.sizes);
  if (header.fortran_order) {
    Shape reversed(header.sizes);
    std::reverse(reversed.begin(), reversed.end());
    strides = contiguous_strides(reversed);
    std::reverse(strides.begin(), strides.end());
  }
  return tensor_in_file(file, header.data_begin, header.sizes, strides, header.dtype,
                        header.big_endian ? ByteOrder::kBig : ByteOrder::kLittle);
}

void save_npy(const std::filesystem::path& path, const Tensor& tensor) {
  const Tensor x = contiguous_for_file("[save_npy] the tensor", tensor);
  const auto* kind =
      std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& row) { return row.dtype == x.dtype(); });
  std::string text =
      concat("{'descr': '", x.elem_bytes() == 1 ? "|" : "<", kind->code, "', 'fortran_order': False, 'shape': (");
  for (size_t d = 0; d < x.sizes().size(); ++d) {
    text += concat(x.sizes()[d], d + 1 < x.sizes().size() ? ", " : x.sizes().size() == 1 ? "," : "");
  }
  text += "), }";
  constexpr size_t kPrefixBytes = 10;
  const size_t whole = (kPrefixBytes + text.size() + 1 + kAlignment - 1) / kAlignment * kAlignment;
  text.resize(whole - kPrefixBytes - 1, ' ');
  text += '\n';

  AtomicFile file(path);
  const auto length = static_cast<uint16_t>(text.size());  // at most eight sizes: far below 65536
  file.write(kNpyMagic);
  file.write(std::string_view("\x01\0", 2));
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(text);
  file.write(bytes_of(x));
  file.commit();
}

}  // namespace chorale::io
