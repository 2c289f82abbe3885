/*
 * A program that is linked to a libibverbs and, with -DPROVIDER, to a provider.
 * Has the library load what is named on the command line; then prints what has
 * registered, in its order.
 */
#include <stdio.h>

int fake_load(const char *provider);
const char *fake_name(int i);
int provider_is_linked(void);

int main(int argc, char **argv)
{
#ifdef PROVIDER
	if (!provider_is_linked())
		return 1;
#endif
	for (int i = 1; i < argc; i++)
		if (fake_load(argv[i]))
			return 1;
	for (int i = 0; fake_name(i); i++)
		puts(fake_name(i));
	return 0;
}
