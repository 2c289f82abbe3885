//! The change of an indirect memory key that functions of `ibv_wr_*` put together:
//! `mlx5dv_wr_mkey_configure` opens it, so many setters complete it.

use mlx5::{Interleaved, KeyLayout, LayoutChange};
use uverbs::{SendFlags, Sge};

use crate::errno::Errno;

/// A change, and room for its layout.
#[derive(Debug, Default)]
pub struct KeyConfig {
    wr_id: u64,
    flags: SendFlags,
    key: u32,
    /// Elements that the key was made for.
    entries: usize,
    /// Setters that are missing; none if there is no change.
    missing: Option<u8>,
    access: Option<u32>,
    layout: Layout,
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
    /// Reserves memory for layouts of so many elements.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn reserve(&mut self, elements: u32) -> Result<(), Errno> {
        let elements = elements as usize;
        (self.list.try_reserve_exact(elements))
            .and_then(|()| self.parts.try_reserve_exact(elements))
            .map_err(|_| Errno::NOMEM)
    }

    /// Opens a change of a key of so many elements, which `setters` complete. One that
    /// was not completed is forgotten.
    pub fn open(&mut self, wr_id: u64, flags: SendFlags, key: u32, entries: u16, setters: u8) {
        (self.wr_id, self.flags, self.key) = (wr_id, flags, key);
        self.entries = entries.into();
        self.missing = Some(setters);
        (self.access, self.layout) = (None, Layout::Unset);
    }

    /// Sets the rights, once.
    ///
    /// # Errors
    /// EINVAL.
    pub fn set_access(&mut self, access: u32) -> Result<(), Errno> {
        if self.access.is_some() {
            return Err(Errno::INVAL);
        }
        self.count()?;
        self.access = Some(access);
        Ok(())
    }

    /// Sets the layout, once.
    ///
    /// # Errors
    /// EINVAL; ENOMEM if it has too many elements.
    pub fn set_list(&mut self, list: &[Sge]) -> Result<(), Errno> {
        self.has_room(list.len(), self.list.capacity())?;
        self.count()?;
        self.list.clear();
        self.list.extend_from_slice(list);
        self.layout = Layout::List;
        Ok(())
    }

    /// As [`KeyConfig::set_list`].
    ///
    /// # Errors
    /// As there.
    pub fn set_interleaved(&mut self, repeat: u32, parts: &[Interleaved]) -> Result<(), Errno> {
        self.has_room(parts.len() + 1, self.parts.capacity())?;
        self.count()?;
        self.parts.clear();
        self.parts.extend_from_slice(parts);
        self.layout = Layout::Interleaved { repeat };
        Ok(())
    }

    fn has_room(&self, elements: usize, room: usize) -> Result<(), Errno> {
        if self.layout != Layout::Unset {
            return Err(Errno::INVAL);
        }
        match elements <= self.entries.min(room) {
            true => Ok(()),
            false => Err(Errno::NOMEM),
        }
    }

    /// Counts a setter.
    fn count(&mut self) -> Result<(), Errno> {
        let missing = self.missing.and_then(|missing| missing.checked_sub(1));
        self.missing = Some(missing.ok_or(Errno::INVAL)?);
        Ok(())
    }

    /// Takes the change, with its identifier and flags, if it is complete.
    pub fn complete(&mut self) -> Option<(u64, SendFlags, LayoutChange<'_>)> {
        if self.missing != Some(0) {
            return None;
        }
        self.missing = None;
        let layout = match self.layout {
            Layout::Unset => None,
            Layout::List => Some(KeyLayout::List(&self.list)),
            Layout::Interleaved { repeat } => Some(KeyLayout::Interleaved {
                repeat,
                parts: &self.parts,
            }),
        };
        let change = LayoutChange {
            key: self.key,
            access: self.access,
            layout,
        };
        Some((self.wr_id, self.flags, change))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(setters: u8) -> KeyConfig {
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
    fn so_many_setters_complete_a_change() {
        assert!(opened(0).complete().is_some());
        let mut config = opened(2);
        config.set_list(&[SGE; 4]).unwrap();
        assert!(config.complete().is_none());
        config.set_access(5).unwrap();
        let (wr_id, flags, change) = config.complete().unwrap();
        assert_eq!((wr_id, flags, change.key), (7, SendFlags::SIGNALED, 0x1200));
        assert_eq!(change.access, Some(5));
        assert!(matches!(change.layout, Some(KeyLayout::List(list)) if list.len() == 4));
        // Only once, and nothing is set without a change.
        assert!(config.complete().is_none());
        assert_eq!(config.set_access(5), Err(Errno::INVAL));
    }

    #[test]
    fn setters_are_called_once_and_fit() {
        let mut config = opened(9);
        config.set_access(1).unwrap();
        assert_eq!(config.set_access(1), Err(Errno::INVAL));
        assert_eq!(config.set_list(&[SGE; 5]), Err(Errno::NOMEM));
        let parts = [Interleaved::default(); 4];
        assert_eq!(config.set_interleaved(2, &parts), Err(Errno::NOMEM));
        config.set_interleaved(2, &parts[..3]).unwrap();
        assert_eq!(config.set_list(&[SGE]), Err(Errno::INVAL));
        // Room of the queue, not of the key.
        config.open(7, SendFlags::empty(), 0, 100, 1);
        assert_eq!(config.set_list(&[SGE; 5]), Err(Errno::NOMEM));
    }
}
