/* Loads libibverbs, the first argument, in each way, twice. The second is a library that loads
 * another. */
#include "hooks.h"

static void load(const char *name, int flags)
{
	for (int n = 0; n < 2; n++) {
		void *library = dlopen(name, RTLD_NOW | flags);
		struct functions verbs;

		if (!library)
			fprintf(stderr, "%s\n", dlerror());
		CHECK(library);
		*(void **)&verbs.list = dlsym(library, "ibv_get_device_list");
		*(void **)&verbs.open = dlsym(library, "ibv_open_device");
		*(void **)&verbs.close = dlsym(library, "ibv_close_device");
		*(void **)&verbs.create = dlsym(library, "ibv_create_cq");
		*(void **)&verbs.destroy = dlsym(library, "ibv_destroy_cq");
		check_hooks(&verbs);
		dlclose(library);
	}
}

int main(int count, char **arguments)
{
	void *(*load_other)(void), *caller;

	CHECK(count == 3);
	load(arguments[1], RTLD_LOCAL | RTLD_DEEPBIND);
	load(arguments[1], RTLD_LOCAL);
	load(arguments[1], RTLD_GLOBAL);
	CHECK(!dlmopen(LM_ID_NEWLM, "libibverbs.so.1", RTLD_NOW));
	CHECK(strstr(dlerror(), "dlmopen is refused by ringverbs"));
	/* The loader searches the RUNPATH of the library that calls dlopen. */
	caller = dlopen(arguments[2], RTLD_NOW);
	CHECK(caller);
	*(void **)&load_other = dlsym(caller, "load_other");
	CHECK(load_other && load_other());
	puts("well");
	return 0;
}
