/* A library that loads one of its RUNPATH. */
#include <dlfcn.h>

void *load_other(void)
{
	return dlopen("libother-of-runpath.so", RTLD_NOW);
}
