#pragma once

/// One plain loop, compiled for what the CPU at hand may have. Sanitizers run
/// after ifunc resolvers do, so their builds take the baseline.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(MUON_NO_TARGET_CLONES)
#define MUON_TARGET_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MUON_TARGET_CLONES
#endif

#define MUON_ALWAYS_INLINE inline __attribute__((always_inline))
