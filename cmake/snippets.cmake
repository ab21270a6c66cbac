# The code blocks of docs/usage, compiled into one program of two snippet_sources (one per core of a small machine) and run on two
# ranks. tests/snippets/extract.py says how a page is read.
file(GLOB pages CONFIGURE_DEPENDS RELATIVE "${CMAKE_SOURCE_DIR}" "${CMAKE_SOURCE_DIR}/docs/usage/*.md")
set(half 0)
foreach(page IN LISTS pages)
  list(APPEND half_${half} "${page}")
  math(EXPR half "1 - ${half}")
endforeach()
foreach(half 0 1)
  set(source "${CMAKE_BINARY_DIR}/snippets_${half}.cc")
  list(APPEND snippet_sources "${source}")
  add_custom_command(OUTPUT "${source}"
    COMMAND python3 tests/snippets/extract.py "${source}" ${half_${half}}
    DEPENDS tests/snippets/extract.py ${half_${half}} WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}" VERBATIM)
endforeach()
add_executable(doc_snippets tests/snippets/main.cc ${snippet_sources})
target_include_directories(doc_snippets PRIVATE "${CMAKE_SOURCE_DIR}")
target_compile_options(doc_snippets PRIVATE -w -O0)  # pages name things that they do not use
target_link_libraries(doc_snippets PRIVATE chorale)
add_test(NAME docs.snippets COMMAND chorale_program run -n 2 $<TARGET_FILE:doc_snippets>)
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/flight")  # for calls that fail on purpose
set_tests_properties(docs.snippets PROPERTIES TIMEOUT 120 LABELS docs
  ENVIRONMENT "CHORALE_FLIGHT_DIR=${CMAKE_BINARY_DIR}/flight")
