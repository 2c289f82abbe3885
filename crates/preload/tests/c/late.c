/* Loads libibverbs itself, late and for itself alone, and unloads it. */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
	for (int n = 0; n < 2; n++) {
		void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
		void **(*list)(int *);
		void *(*open)(void *);
		int (*close)(void *);
		void **devices, *context;
		int count = 0;

		if (!library) {
			fprintf(stderr, "%s\n", dlerror());
			return 1;
		}
		list = (void **(*)(int *))dlsym(library, "ibv_get_device_list");
		open = (void *(*)(void *))dlsym(library, "ibv_open_device");
		close = (int (*)(void *))dlsym(library, "ibv_close_device");
		devices = list(&count);
		if (count != 1)
			return 2;
		context = open(devices[0]);
		if (!context || close(context))
			return 3;
		dlclose(library);
	}
	return 0;
}
