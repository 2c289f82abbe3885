/*
 * Has an allocator that reads a file of the system in its first call, as mimalloc does for the
 * number of NUMA nodes. Exit status 0 if there is a device.
 */
#include <infiniband/verbs.h>
#include <stddef.h>
#include <unistd.h>

#include "check.h"

void *__libc_malloc(size_t size);

static int is_ready, depth;

void *malloc(size_t size)
{
	if (!is_ready) {
		if (++depth > 100)
			_exit(2);
		access("/sys/devices/system/node/node1", R_OK);
		is_ready = 1;
	}
	return __libc_malloc(size);
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	CHECK(devices && devices[0]);
	ibv_free_device_list(devices);
	return 0;
}
