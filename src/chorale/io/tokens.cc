#include "chorale/io/tokens.h"

#include <array>
#include <cstring>
#include <limits>

#include "chorale/base/error.h"

namespace chorale::io {
namespace {

using Header = std::array<int32_t, 256>;
constexpr int32_t kShardMagic = 20240520, kShardVersion = 1;

}  // namespace

std::span<const uint16_t> parse_token_shard(const std::string& what, std::span<const std::byte> bytes) {
  Header header{};
  CHORALE_CHECK(bytes.size() >= sizeof header, "[tokens] ", what, " has ", bytes.size(),
                " bytes; a shard begins with a header of ", sizeof header);
  std::memcpy(header.data(), bytes.data(), sizeof header);
  CHORALE_CHECK(header[0] == kShardMagic, "[tokens] ", what, " is not a token shard: it should begin with ",
                kShardMagic, ", not ", header[0]);
  CHORALE_CHECK(header[1] == kShardVersion, "[tokens] ", what, " has version ", header[1], "; only ", kShardVersion,
                " is known");
  const size_t room = (bytes.size() - sizeof header) / sizeof(uint16_t);
  CHORALE_CHECK(header[2] >= 0 && static_cast<size_t>(header[2]) == room && bytes.size() % sizeof(uint16_t) == 0,
                "[tokens] ", what, " says that it has ", header[2], " tokens of 2 bytes, but ",
                bytes.size() - sizeof header, " bytes follow its header");
  return {reinterpret_cast<const uint16_t*>(bytes.data() + sizeof header), room};
}

TokenShard::TokenShard(const std::filesystem::path& path)
    : file_(MappedFile::open(path)), tokens_(parse_token_shard(path.string(), file_->bytes())) {}

void save_token_shard(const std::filesystem::path& path, std::span<const uint16_t> tokens) {
  CHORALE_CHECK(tokens.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()), "[save_token_shard] ",
                tokens.size(), " tokens are too many for one shard; write several");
  Header header{};
  header[0] = kShardMagic;
  header[1] = kShardVersion;
  header[2] = static_cast<int32_t>(tokens.size());
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(header)));
  file.write(std::as_bytes(tokens));
  file.commit();
}

}  // namespace chorale::io
