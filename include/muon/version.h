#pragma once

/// The one place where libmuon's version is written.
#define MUON_VERSION_MAJOR 0
#define MUON_VERSION_MINOR 1
#define MUON_VERSION_PATCH 0
#define MUON_VERSION "0.1.0"
