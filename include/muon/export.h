#pragma once

/// Marks what libmuon.so exports; everything else has hidden visibility.
#if defined(_WIN32)
#define MUON_API
#else
#define MUON_API __attribute__((visibility("default")))
#endif
