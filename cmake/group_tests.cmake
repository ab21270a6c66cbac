# Writes several test sources into one, for chorale_test_sources:
#
#   cmake -DOUT=x.cc -DFOLDER=src -DPREFIX=../../src/ "-DFILES=comm/a_test.cc;comm/b_test.cc" -P group_tests.cmake
#
# Tests name their helpers as they like, so two of one folder often have one of the same name: each source's anonymous
# namespace goes into a namespace of the source's name. Lines keep their numbers, so that messages of the compiler name the source.
set(text "")
foreach(file IN LISTS FILES)
  file(READ "${FOLDER}/${file}" source)
  string(MAKE_C_IDENTIFIER "of_${file}" name)
  string(REPLACE "\nnamespace {\n" "\nnamespace ${name} { namespace {\n" source "${source}")
  string(REPLACE "\n}  // namespace\n" "\n} }  // namespace\n" source "${source}")
  string(APPEND text "#line 1 \"${PREFIX}${file}\"\n" "${source}")
endforeach()
file(WRITE "${OUT}" "${text}")
