// Memory that a thread keeps from call to call: it grows to the largest call and stays.
#pragma once

#include <stdlib.h>

namespace {

struct Scratch {
    void* data = nullptr;
    size_t size = 0;
    ~Scratch() { free(data); }
    template <class T>
    T* get(long count) {
        size_t wanted = (size_t)count * sizeof(T) + 64;
        if (wanted > size) {
            free(data);
            if (posix_memalign(&data, 4096, wanted) != 0) abort();
            size = wanted;
        }
        return (T*)data;
    }
};

// Cuts one piece of memory into aligned parts. Used twice with the same parts: without memory it only counts the bytes.
struct Cutter {
    char* memory;
    size_t used = 0;
    explicit Cutter(void* start) : memory((char*)start) {}
    template <class T>
    T* take(long count) {
        T* part = memory == nullptr ? nullptr : (T*)(memory + used);
        used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
        return part;
    }
};

}  // namespace
