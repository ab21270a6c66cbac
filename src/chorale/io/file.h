// Files, as the readers and writers of this layer want them: mapped whole, or written so that a crash leaves the old
// file or the new one.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace chorale::io {

// A file mapped into memory, read-only. It may be replaced or removed meanwhile, as AtomicFile and most programs do; if
// somebody shortens it in place instead, reading the lost part ends the process (SIGBUS).
class MappedFile {
 public:
  // Throws InvalidArgument, naming the path, when it cannot be read or is no regular file.
  // `is_read`: read() will be called, for which a descriptor is kept.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path, bool is_read = false);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
  const std::filesystem::path& path() const { return path_; }
  // Copies bytes of it without mapping their pages. Throws InvalidArgument where they cannot be read.
  void read(size_t begin, std::span<std::byte> into) const;

 private:
  MappedFile() = default;

  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  int file_ = -1;
};

// A file that appears under its name all at once: bytes go to a temporary file beside it; commit() makes them durable
// and renames. Without commit() nothing is left. Replaces an existing file; readers that have it open keep the old one.
// What is no regular file is never replaced, nor is a link, nor the file behind it (io/no_link.h).
class AtomicFile {
 public:
  // Throws InvalidArgument when the folder does not take a file, or when the name belongs to something else. `spare` is
  // a file on the same file system that nobody needs any more: it goes, and where nobody has it open or under another
  // name its room is written over, which costs less than new room where files are memory.
  explicit AtomicFile(std::filesystem::path path, const std::filesystem::path& spare = {});
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Throw StateError when the system refuses (disk full, quota, an I/O error); the file under the name is then as
  // before.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  int file_ = -1;
  bool is_spare_ = false;  // and may be longer than what is written
};

// Gives a file or folder another name on the same file system, durably. StateError when the system refuses, such as for
// a folder whose new name is taken.
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

// Writes a whole file, atomically.
void write_file(const std::filesystem::path& path, std::string_view text);

}  // namespace chorale::io
