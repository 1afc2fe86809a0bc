# What every translation unit of the project is compiled with.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# -fPIC by hand, not through POSITION_INDEPENDENT_CODE: that gives programs -fPIE, and tests could not share one
# precompiled header.
add_compile_options(-fPIC -Wall -Wextra -Wno-unused-parameter)

set(FSDP_SANITIZE "" CACHE STRING "Sanitizers, a list: address;undefined or thread")
if(FSDP_SANITIZE)
  list(JOIN FSDP_SANITIZE "," sanitizers)
  # No vptr checks: libtorch's type information is not where they look for it.
  add_compile_options(-fsanitize=${sanitizers} -fno-sanitize=vptr -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${sanitizers})
else()
  add_link_options(-Wl,-z,defs)
endif()

find_program(FSDP_CCACHE ccache)
if(FSDP_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${FSDP_CCACHE})
endif()
