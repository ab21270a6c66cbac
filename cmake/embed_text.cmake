# Makes a C++ source that defines the text of a file: cmake -DFILE=page.js -DNAMESPACE=chorale::report -DOUT=page.js.cc
# -P embed_text.cmake gives chorale::report::kPageJs, a std::string_view.
cmake_path(GET FILE FILENAME name)
string(REGEX MATCHALL "[a-z0-9]+" words "${name}")
set(variable "k")
foreach(word IN LISTS words)
  string(SUBSTRING "${word}" 0 1 first)
  string(SUBSTRING "${word}" 1 -1 rest)
  string(TOUPPER "${first}" first)
  string(APPEND variable "${first}${rest}")
endforeach()
file(READ "${FILE}" text)
file(WRITE "${OUT}" "// Made from ${name}.
#include <string_view>
namespace ${NAMESPACE} {
extern const std::string_view ${variable};
const std::string_view ${variable} = R\"EMBEDDED(${text})EMBEDDED\";
}
")
