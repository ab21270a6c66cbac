# Installs chorale/chorale.h and every header of ours that it reaches. It runs at installation and not when CMake
# configures: the list is then never out of date. CHORALE_SOURCES is the folder that include paths start from.
cmake_policy(VERSION 3.25)
set(to_read chorale/chorale.h)
set(headers "")
while(to_read)
  list(POP_FRONT to_read header)
  list(APPEND headers ${header})
  file(STRINGS "${CHORALE_SOURCES}/${header}" includes REGEX "^#include \"chorale/")
  foreach(include IN LISTS includes)
    string(REGEX REPLACE "^#include \"([^\"]+)\".*" "\\1" included "${include}")
    if(NOT included IN_LIST headers AND NOT included IN_LIST to_read)
      list(APPEND to_read ${included})
    endif()
  endforeach()
endwhile()
foreach(header IN LISTS headers)
  cmake_path(GET header PARENT_PATH folder)
  file(INSTALL "${CHORALE_SOURCES}/${header}" DESTINATION "${CMAKE_INSTALL_PREFIX}/include/${folder}")
endforeach()

# Headers that have moved are found at their old place too, for one version: old and new path, side by side.
set(moved
  base/trace.h trace/trace.h
  base/trace_summary.h trace/trace_summary.h
  comm/net_options.h comm/net/net_options.h
  nn/for_each.h base/for_each.h
  transport/chaos.h transport/fabric/chaos.h
  transport/rendezvous.h transport/store/rendezvous.h
  transport/secret.h transport/security/secret.h
  transport/store.h transport/store/store.h)
while(moved)
  list(POP_FRONT moved old new)
  file(WRITE "${CMAKE_INSTALL_PREFIX}/include/chorale/${old}"
    "// Moved.\n#pragma once\n\n#include \"chorale/${new}\"  // IWYU pragma: export\n")
endwhile()
