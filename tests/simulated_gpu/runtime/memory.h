// Whose memory an address is: device memory lies in a range of its own, the rest is the host's, pinned or pageable.
#pragma once
#include "world.h"

namespace simgpu {

constexpr int MOST_DEVICES = 16;
constexpr uintptr_t DEVICE_MEMORY = 0x200000000000;  // of device 0; the others follow
constexpr size_t ADDRESSES_PER_DEVICE = 1ull << 40;
constexpr size_t GRANULARITY = 2 << 20;

// Device memory -------------------------------------------------------------------------------------------------------

bool is_device(uintptr_t address);
int device_of(uintptr_t address);

void reserve_addresses_of(int device);
// 0 if there are none left. What lies behind them is not handed out, so that whoever runs over the end is found.
uintptr_t take_addresses(int device, size_t nbytes);
void give_addresses_back(uintptr_t address, size_t nbytes);

// Gives memory to addresses, and takes it away: a block is what may be touched.
void make_block(uintptr_t address, size_t nbytes);
void drop_block(uintptr_t address, size_t nbytes);
bool is_allocated(uintptr_t address, size_t nbytes);

// Host memory ---------------------------------------------------------------------------------------------------------

// The registration that an address lies in, as an iterator of `World::pinned`; its end if there is none.
std::map<uintptr_t, size_t>::iterator registration_at(uintptr_t address);

// Both ----------------------------------------------------------------------------------------------------------------

enum class Kind { PAGEABLE, PINNED, DEVICE, WRONG };

// What an operation is about to be enqueued for; reports a violation where it is WRONG.
Kind kind_of(uintptr_t address, size_t nbytes, const char* what);
// At the time it runs.
void check_is_allocated(uintptr_t address, size_t nbytes, const char* what);

// The name of an operation in a queue that touches these addresses, or null.
const char* pending_on(uintptr_t address, size_t nbytes);

}  // namespace simgpu
