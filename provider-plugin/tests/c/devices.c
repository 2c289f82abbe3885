/* Lists the devices of the system's libibverbs, opened with RTLD_LOCAL. */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
	void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
	void **(*get_device_list)(int *);
	const char *(*get_device_name)(void *);
	void **list;
	int n = 0;

	if (!lib) {
		puts("no libibverbs");
		return 0;
	}
	get_device_list = (void **(*)(int *))dlsym(lib, "ibv_get_device_list");
	get_device_name = (const char *(*)(void *))dlsym(lib, "ibv_get_device_name");
	list = get_device_list(&n);
	for (int i = 0; list && i < n; i++)
		printf("device %s\n", get_device_name(list[i]));
	return 0;
}
