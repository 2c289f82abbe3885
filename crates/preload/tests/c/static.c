/* Linked statically to libibverbs and libmlx5. With an argument, it also loads the system's
 * libibverbs. */
#include "hooks.h"

/* A macro that registers the providers. */
static struct ibv_device **list(int *count)
{
	return ibv_get_device_list(count);
}

static void *function(void *library, const char *name)
{
	void *found = dlsym(library, name);

	CHECK(found);
	return found;
}

int main(int count, char **arguments)
{
	struct functions verbs = {
		.list = list,
		.open = ibv_open_device,
		.close = ibv_close_device,
		.create = ibv_create_cq,
		.destroy = ibv_destroy_cq,
	};

	check_hooks(&verbs);
	if (count > 1) {
		void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
		struct functions loaded;

		CHECK(library);
		*(void **)&loaded.list = function(library, "ibv_get_device_list");
		*(void **)&loaded.open = function(library, "ibv_open_device");
		*(void **)&loaded.close = function(library, "ibv_close_device");
		*(void **)&loaded.create = function(library, "ibv_create_cq");
		*(void **)&loaded.destroy = function(library, "ibv_destroy_cq");
		CHECK(loaded.open != ibv_open_device);
		check_hooks(&loaded);
		check_hooks(&verbs);
	}
	puts("well");
	return 0;
}
