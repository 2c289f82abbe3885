/*
 * A provider such as libmlx5, which is a library that programs are linked to as
 * well. Compiled with -DPABI=N -DNAME="..." and linked to a libibverbs.
 */
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

void CAT(verbs_register_driver_, PABI)(const void *driver);

static const struct {
	const char *name;
	char rest[88];
} driver = { .name = NAME };

/* Optimized, it ends with a jump: it is not on the stack of what it calls. */
__attribute__((constructor)) static void on_load(void)
{
	CAT(verbs_register_driver_, PABI)(&driver);
}

int provider_is_linked(void)
{
	return 1;
}
