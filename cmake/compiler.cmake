# Flags of every target of ours, compiler cache and linker. Baseline x86-64 only: wider vectors are chosen at run time.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")

find_program(CHORALE_CCACHE ccache)
if(CHORALE_CCACHE)
  # Paths below the source folder are made relative before hashing, so that all checkouts on a machine share hits.
  set(CMAKE_CXX_COMPILER_LAUNCHER env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${CHORALE_CCACHE}")
  file(RELATIVE_PATH source_from_build "${CMAKE_BINARY_DIR}" "${CMAKE_SOURCE_DIR}/src")
  set(source_prefix "${source_from_build}/")
else()
  set(source_prefix "${CMAKE_SOURCE_DIR}/src/")
endif()

add_library(chorale_flags INTERFACE)
target_include_directories(chorale_flags INTERFACE "${CMAKE_SOURCE_DIR}/src")
target_compile_options(chorale_flags INTERFACE
  -Wall -Wextra -Wshadow -Wconversion
  -fno-math-errno                         # sqrt becomes an instruction; nothing reads errno after a maths call
  "-fmacro-prefix-map=${source_prefix}="  # __FILE__ is a path of the repository
)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # Clang counts signed <-> unsigned as conversions; g++, the compiler of record, does not for C++.
  target_compile_options(chorale_flags INTERFACE -Wno-sign-conversion)
elseif(CHORALE_WERROR)
  target_compile_options(chorale_flags INTERFACE -Werror)
  # g++ 12 imagines overlapping copies in "text" + std::string at -O3 (its bug 105651).
  target_compile_options(chorale_flags INTERFACE $<$<CONFIG:Release>:-Wno-restrict>)
endif()

if(CHORALE_SANITIZE)
  # All layers are instrumented but those of CHORALE_UNSANITIZED (chorale_layer.cmake).
  target_compile_options(chorale_flags INTERFACE "$<$<NOT:$<BOOL:$<TARGET_PROPERTY:CHORALE_UNSANITIZED>>>:-fsanitize=${CHORALE_SANITIZE}>"
    -fno-omit-frame-pointer -fno-sanitize-recover=all)
  # With the checks in between, GCC no longer sees that a variant is never read as what it is not.
  target_compile_options(chorale_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_options(chorale_flags INTERFACE "-fsanitize=${CHORALE_SANITIZE}")
endif()

find_program(CHORALE_LLD ld.lld)
if(CHORALE_LLD)
  target_link_options(chorale_flags INTERFACE -fuse-ld=lld)
endif()
