/*
 * Uses libibverbs as a program does that has more rights than whoever runs it,
 * and says what of that user's choice the process has come to: what is mapped.
 * Loads the provider by a path of its own, as an installed one is loaded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>

int main(void)
{
	struct ibv_device **list;
	struct ibv_context *context;
	struct ibv_device_attr attr;
	char line[4096];
	FILE *maps;
	int count = 0;

	printf("elevated: %lu\n", getauxval(AT_SECURE));
#ifdef PLUGIN
	if (!dlopen(PLUGIN, RTLD_NOW)) {
		printf("dlopen: %s\n", dlerror());
		return 1;
	}
#endif
	list = ibv_get_device_list(&count);
	printf("devices: %d\n", count);
	for (int i = 0; i < count; i++) {
		printf("device: %s\n", ibv_get_device_name(list[i]));
		context = ibv_open_device(list[i]);
		if (!context || ibv_query_device(context, &attr)) {
			perror("opening");
			continue;
		}
		ibv_close_device(context);
	}
	if (list)
		ibv_free_device_list(list);
	maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof(line), maps))
		fputs(line, stdout);
	return 0;
}
