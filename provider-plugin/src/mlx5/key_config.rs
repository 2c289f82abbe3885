//! The change of an indirect memory key by `ibv_wr_*`: `mlx5dv_wr_mkey_configure` opens it,
//! and the given number of setters complete it.

use core::ffi::c_int;
use core::ptr::NonNull;

use mlx5::{Interleaved, KeyLayout, LayoutChange};
use uverbs::{SendFlags, Sge};

use crate::errno::Errno;
use crate::mlx5dv::protection::Protection;

/// A complete change: identifier, flags, change.
pub type CompleteChange<'a> = (u64, SendFlags, LayoutChange<'a>);

/// The open change of a key, and memory for its layout.
#[derive(Debug, Default)]
pub struct KeyConfig {
    wr_id: u64,
    flags: SendFlags,
    key: u32,
    /// Reserved elements of `list` and `parts`, and the maximum elements of the key.
    room: usize,
    entries: usize,
    /// Number of missing setters; 0 if there is no change.
    missing: u8,
    access: Option<u32>,
    layout: Layout,
    /// Signatures and encryption of the key, if it may have any.
    pub protection: Option<NonNull<Protection>>,
    /// A layout that was set before the last setter.
    list: Vec<Sge>,
    parts: Vec<Interleaved>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Layout {
    #[default]
    Unset,
    List,
    Interleaved {
        repeat: u32,
    },
}

impl KeyConfig {
    /// Reserves memory for layouts of `elements` elements.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn reserve(&mut self, elements: u32) -> Result<(), Errno> {
        self.room = elements as usize;
        (self.list.try_reserve_exact(self.room))
            .and_then(|()| self.parts.try_reserve_exact(self.room))
            .map_err(|_| Errno::NOMEM)
    }

    /// Opens a change of a key of `entries` elements, which `setters` setters complete.
    /// Discards an incomplete change.
    pub fn open(&mut self, wr_id: u64, flags: SendFlags, key: u32, entries: u16, setters: u8) {
        (self.wr_id, self.flags, self.key) = (wr_id, flags, key);
        self.entries = entries.into();
        self.missing = setters;
        (self.access, self.layout) = (None, Layout::Unset);
    }

    /// Discards an incomplete change.
    pub fn discard(&mut self) {
        self.missing = 0;
    }

    /// Returns whether setters are missing.
    pub fn is_open(&self) -> bool {
        self.missing != 0
    }

    /// Fast path of [`KeyConfig::set_access`]: the change is not complete after it. Returns
    /// false and sets nothing if it does not apply.
    #[inline]
    pub fn set_access_fast(&mut self, access: u32) -> bool {
        let applies = self.missing > 1 && self.access.is_none();
        if applies {
            self.missing -= 1;
            self.access = Some(access);
        }
        applies
    }

    /// Fast path of [`KeyConfig::set_layout`]: it completes the change of a key without
    /// protection. Returns `None` and sets nothing if it does not apply.
    #[inline]
    pub fn set_layout_fast<'a>(&mut self, layout: KeyLayout<'a>) -> Option<CompleteChange<'a>> {
        let applies = self.missing == 1
            && self.layout == Layout::Unset
            && self.protection.is_none()
            && layout.elements() != 0
            && layout.elements() <= self.entries;
        applies.then(|| {
            self.missing = 0;
            self.complete(Some(layout))
        })
    }

    /// Sets the rights, once. Returns the change if it is complete then.
    ///
    /// # Errors
    /// EINVAL.
    pub fn set_access(&mut self, access: u32) -> Result<Option<CompleteChange<'_>>, c_int> {
        if self.access.is_some() {
            return Err(libc::EINVAL);
        }
        let last = self.count_setter()?;
        self.access = Some(access);
        Ok(last.then(|| self.complete_copied()))
    }

    /// The protection of the key.
    ///
    /// # Errors
    /// EINVAL if there is none.
    pub fn open_protection(&self) -> Result<NonNull<Protection>, c_int> {
        let protection = self.protection.filter(|_| self.is_open());
        protection.ok_or(libc::EINVAL)
    }

    /// Counts that a part of the protection was set. Returns the change if it is complete
    /// then.
    ///
    /// # Errors
    /// EINVAL.
    pub fn set_protection(&mut self) -> Result<Option<CompleteChange<'_>>, c_int> {
        let last = self.count_setter()?;
        Ok(last.then(|| self.complete_copied()))
    }

    /// The change with the copied layout.
    fn complete_copied(&self) -> CompleteChange<'_> {
        let layout = match self.layout {
            Layout::Unset => None,
            Layout::List => Some(KeyLayout::List(&self.list)),
            Layout::Interleaved { repeat } => Some(KeyLayout::Interleaved {
                repeat,
                parts: &self.parts,
            }),
        };
        self.complete(layout)
    }

    /// Sets the layout, once. Returns the change if it is complete then; otherwise the
    /// layout is copied.
    ///
    /// # Errors
    /// EINVAL; ENOMEM if it has too many elements.
    pub fn set_layout<'a>(
        &'a mut self,
        layout: KeyLayout<'a>,
    ) -> Result<Option<CompleteChange<'a>>, c_int> {
        if !self.is_open() || self.layout != Layout::Unset {
            return Err(libc::EINVAL);
        }
        if layout.elements() > self.entries {
            return Err(libc::ENOMEM);
        }
        if self.count_setter()? {
            return Ok(Some(self.complete(Some(layout))));
        }
        self.copy_layout(layout)?;
        Ok(None)
    }

    #[cold]
    fn copy_layout(&mut self, layout: KeyLayout<'_>) -> Result<(), c_int> {
        if layout.elements() > self.room {
            return Err(libc::ENOMEM);
        }
        match layout {
            KeyLayout::List(list) => {
                self.list.clear();
                self.list.extend_from_slice(list);
                self.layout = Layout::List;
            }
            KeyLayout::Interleaved { repeat, parts } => {
                self.parts.clear();
                self.parts.extend_from_slice(parts);
                self.layout = Layout::Interleaved { repeat };
            }
        }
        Ok(())
    }

    /// Counts a setter. Returns whether it was the last, after which there is no change.
    fn count_setter(&mut self) -> Result<bool, c_int> {
        self.missing = self.missing.checked_sub(1).ok_or(libc::EINVAL)?;
        Ok(self.missing == 0)
    }

    /// The change with `layout`.
    pub fn complete<'a>(&self, layout: Option<KeyLayout<'a>>) -> CompleteChange<'a> {
        let change = LayoutChange {
            key: self.key,
            access: self.access,
            layout,
        };
        (self.wr_id, self.flags, change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_config(setters: u8) -> KeyConfig {
        let mut config = KeyConfig::default();
        config.reserve(4).unwrap();
        config.open(7, SendFlags::SIGNALED, 0x1200, 4, setters);
        config
    }

    const SGE: Sge = Sge {
        addr: 1,
        length: 2,
        lkey: 3,
    };

    #[test]
    fn the_last_setter_completes_a_change() {
        // In either order; a layout that is not the last is kept.
        for layout_first in [true, false] {
            let list = [SGE; 4];
            let mut config = open_config(2);
            let complete = if layout_first {
                assert!(config.set_layout(KeyLayout::List(&list)).unwrap().is_none());
                config.set_access(5).unwrap()
            } else {
                assert!(config.set_access(5).unwrap().is_none());
                config.set_layout(KeyLayout::List(&list)).unwrap()
            };
            let (wr_id, flags, change) = complete.unwrap();
            assert_eq!((wr_id, flags, change.key), (7, SendFlags::SIGNALED, 0x1200));
            assert_eq!(change.access, Some(5));
            assert!(matches!(change.layout, Some(KeyLayout::List(list)) if list == [SGE; 4]));
            // Nothing is set without a change.
            assert_eq!(config.set_access(5).err(), Some(libc::EINVAL));
        }
    }

    #[test]
    fn setters_are_called_once_and_fit() {
        let list = KeyLayout::List(&[SGE; 5]);
        let parts = [Interleaved::default(); 4];
        let parts = |count| KeyLayout::Interleaved {
            repeat: 2,
            parts: &parts[..count],
        };
        let mut config = open_config(9);
        config.set_access(1).unwrap();
        assert_eq!(config.set_access(1).err(), Some(libc::EINVAL));
        assert_eq!(config.set_layout(list).err(), Some(libc::ENOMEM));
        assert_eq!(config.set_layout(parts(4)).err(), Some(libc::ENOMEM));
        config.set_layout(parts(3)).unwrap();
        assert_eq!(
            config.set_layout(KeyLayout::List(&[SGE])).err(),
            Some(libc::EINVAL)
        );
        // Without a change there is nothing to set.
        config.discard();
        assert_eq!(config.set_layout(list).err(), Some(libc::EINVAL));
        // Room of the queue, not of the key: for a layout that is not set last.
        config.open(7, SendFlags::empty(), 0, 100, 2);
        assert_eq!(config.set_layout(list).err(), Some(libc::ENOMEM));
    }

    #[test]
    fn the_fast_setters_agree_with_the_others_or_do_nothing() {
        let list = [SGE; 4];
        let mut config = open_config(2);
        assert!(config.set_layout_fast(KeyLayout::List(&list)).is_none());
        assert!(config.set_access_fast(5));
        // Once.
        assert!(!config.set_access_fast(5));
        assert!(config.set_layout_fast(KeyLayout::List(&[])).is_none());
        assert!(config.set_layout_fast(KeyLayout::List(&[SGE; 5])).is_none());
        let (wr_id, flags, change) = config.set_layout_fast(KeyLayout::List(&list)).unwrap();
        assert_eq!((wr_id, flags, change.key), (7, SendFlags::SIGNALED, 0x1200));
        assert_eq!(change.access, Some(5));
        assert!(matches!(change.layout, Some(KeyLayout::List(list)) if list == [SGE; 4]));
        // Nothing is open.
        assert!(config.set_layout_fast(KeyLayout::List(&list)).is_none());
        assert!(!config.set_access_fast(5));
        // The last setter of a change is not noted, and a layout is set once.
        config = open_config(1);
        assert!(!config.set_access_fast(5));
        config = open_config(2);
        config.set_layout(KeyLayout::List(&list)).unwrap();
        assert!(config.set_layout_fast(KeyLayout::List(&list)).is_none());
    }
}
