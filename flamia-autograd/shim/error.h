// How exceptions leave the shim: as texts.
#pragma once

#include <c10/util/Exception.h>

#include <cstring>
#include <exception>

// Runs `body`. Null if it returns, else a malloc'ed message that the caller frees.
template <typename Body> char *catching(Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error &e) {
    return strdup(e.what_without_backtrace());
  } catch (const std::exception &e) {
    return strdup(e.what());
  } catch (...) {
    return strdup("an exception that is not a std::exception");
  }
}
