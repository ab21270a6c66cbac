include(GoogleTest)

# chorale_layer(NAME [PROGRAM EXECUTABLE] [OPTIONS FLAG...] [LIBRARIES TARGET...] [DEPS LAYER...] [TEST_DEPS LAYER...])
#
# Makes a layer of the folder src/chorale/NAME, whose sources are found by suffix:
#   *.cc, *.cu (with CHORALE_CUDA)  into libchorale
#   *_module.cc                     into lib/chorale_*.so, loaded at first use (base/shared_object.h), where third_party.cmake
#                                   has found what it needs
#   *_test_util.cc                  into the library linked to every test
#   *_test.cc                       into NAME_test, each test registered with ctest as its own entry
#   *_fuzz_test.cc                  also into fuzz_NAME_*, a program each, with CHORALE_FUZZ (testing/fuzz_test_util.h)
#   *_bench.cc                      left to the program that collects them
#   *.html, *.css, *.js             into libchorale as text: page.js is chorale::NAME::kPageJs (embed_text.cmake)
# OPTIONS are for the compiler, on the layer's own sources. With PROGRAM the layer is an executable of that name instead of
# a part of libchorale; main.cc is kept out of its tests. LIBRARIES are those that only this program needs.
# DEPS (ALL: every layer) may be included, and what those may include; TEST_DEPS by tests only. tools/layers enforces both.
function(chorale_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 layer "" "PROGRAM" "OPTIONS;LIBRARIES;DEPS;TEST_DEPS")
  if(CHORALE_LAYERS AND NOT name IN_LIST CHORALE_LAYERS)
    return()
  endif()
  set(folder "${CMAKE_SOURCE_DIR}/src/chorale/${name}")
  foreach(dep IN LISTS layer_DEPS)
    if(NOT dep STREQUAL "ALL" AND NOT IS_DIRECTORY "${CMAKE_SOURCE_DIR}/src/chorale/${dep}")
      message(FATAL_ERROR "Layer ${name} names ${dep}, but there is no folder src/chorale/${dep}.")
    endif()
  endforeach()

  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${folder}/*.cc" "${folder}/*.cu")
  if(NOT CHORALE_CUDA)
    list(FILTER sources EXCLUDE REGEX "\\.cu$")
  endif()
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.c[cu]$")
  set(test_utils ${sources})
  list(FILTER test_utils INCLUDE REGEX "_test_util\\.c[cu]$")
  set(modules ${sources})
  list(FILTER modules INCLUDE REGEX "_module\\.cc$")
  list(FILTER sources EXCLUDE REGEX "_(test|test_util|bench|module)\\.c[cu]$")
  list(REMOVE_ITEM sources "${folder}/main.cc")
  file(GLOB_RECURSE texts CONFIGURE_DEPENDS "${folder}/*.html" "${folder}/*.css" "${folder}/*.js")
  foreach(path IN LISTS texts)
    cmake_path(GET path FILENAME file)
    set(made "${CMAKE_BINARY_DIR}/embedded/${name}/${file}.cc")
    add_custom_command(OUTPUT "${made}" DEPENDS "${path}" "${CMAKE_SOURCE_DIR}/cmake/embed_text.cmake" VERBATIM
      COMMAND "${CMAKE_COMMAND}" "-DFILE=${path}" "-DNAMESPACE=chorale::${name}" "-DOUT=${made}"
        -P "${CMAKE_SOURCE_DIR}/cmake/embed_text.cmake")
    list(APPEND sources "${made}")
  endforeach()

  if(sources)
    add_library(chorale_${name} OBJECT ${sources})
    target_link_libraries(chorale_${name} PRIVATE chorale_flags chorale_third_party ${layer_LIBRARIES})
    target_compile_options(chorale_${name} PRIVATE ${layer_OPTIONS})
    if(name IN_LIST CHORALE_UNSANITIZED)
      set_target_properties(chorale_${name} PROPERTIES CHORALE_UNSANITIZED ON)
    endif()
    if(layer_PROGRAM)
      add_executable(${layer_PROGRAM}_program "${folder}/main.cc" $<TARGET_OBJECTS:chorale_${name}>)
      set_target_properties(${layer_PROGRAM}_program PROPERTIES OUTPUT_NAME ${layer_PROGRAM})
      target_link_libraries(${layer_PROGRAM}_program PRIVATE chorale ${layer_LIBRARIES})
    else()
      target_sources(chorale_shared PRIVATE $<TARGET_OBJECTS:chorale_${name}>)
      target_sources(chorale_static PRIVATE $<TARGET_OBJECTS:chorale_${name}>)
    endif()
  endif()
  foreach(path IN LISTS modules)
    cmake_path(GET path STEM stem)
    string(REGEX REPLACE "_module$" "" stem "${stem}")
    if(NOT TARGET chorale_${stem}_library)
      message(STATUS "Without chorale_${stem}.so: its library is not here (chorale doctor says what to install)")
      continue()
    endif()
    add_library(chorale_${stem}_module MODULE "${path}")
    set_target_properties(chorale_${stem}_module PROPERTIES PREFIX "" OUTPUT_NAME chorale_${stem})
    target_link_libraries(chorale_${stem}_module PRIVATE chorale_flags chorale_${stem}_library)
    foreach(library chorale_shared chorale_static)  # neither links it
      add_dependencies(${library} chorale_${stem}_module)
    endforeach()
  endforeach()
  if(CHORALE_FUZZ)
    set(fuzzers ${tests})
    list(FILTER fuzzers INCLUDE REGEX "_fuzz_test\\.cc$")
    foreach(path IN LISTS fuzzers)
      cmake_path(GET path STEM stem)
      string(REGEX REPLACE "_fuzz_test$" "" stem "${stem}")
      add_executable(fuzz_${name}_${stem} "${path}" "${CMAKE_SOURCE_DIR}/src/chorale/testing/fuzz_test_util.cc")
      target_compile_definitions(fuzz_${name}_${stem} PRIVATE CHORALE_LIBFUZZER)
      target_link_options(fuzz_${name}_${stem} PRIVATE -fsanitize=fuzzer)
      target_link_libraries(fuzz_${name}_${stem} PRIVATE chorale)
    endforeach()
  endif()
  if(NOT CHORALE_TESTS)
    return()
  endif()
  if(test_utils)
    target_sources(chorale_test_util PRIVATE ${test_utils})
  endif()
  if(tests)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE chorale_test_util ${layer_LIBRARIES})
    if(layer_PROGRAM)
      target_sources(${name}_test PRIVATE $<TARGET_OBJECTS:chorale_${name}>)
    endif()
    # The watchdog of a test (testing/test_main_test_util.cc) barks first; ctest's own limit prints no stacks.
    set(limit_s 200)
    if(CHORALE_SANITIZE)
      set(limit_s 600)
    endif()
    # Listing at test time, not at build time: a test program that cannot start is then a failed test, not a failed build.
    # Disabled tests are what ranks do that tests/*.py start: no tests by themselves.
    gtest_discover_tests(${name}_test TEST_PREFIX "${name}." NO_PRETTY_VALUES DISCOVERY_MODE PRE_TEST
      TEST_FILTER "-*.DISABLED_*"
      DISCOVERY_TIMEOUT 60
      PROPERTIES TIMEOUT ${limit_s} LABELS ${name})
  else()
    add_custom_target(${name}_test)  # so that ./test --layers may name a layer without tests
  endif()
endfunction()
