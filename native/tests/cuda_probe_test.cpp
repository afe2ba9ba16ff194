// Which features the pages of a GPU get, over a driver of the test that refuses some of them at some call.
#include "backends/cuda.hpp"
#include "testing.hpp"

using namespace vram;

namespace {

constexpr CuResult kRefused = 999;  // CUDA_ERROR_UNKNOWN

// A driver with one device. Pages are numbered by their features.
struct Driver {
  enum : unsigned { kRdma = 1, kExports = 2 };
  unsigned promised = kRdma | kExports;  // by the device
  unsigned created = kRdma | kExports;   // what cuMemCreate grants
  unsigned usable = kRdma | kExports;    // what cuMemSetAccess grants
  unsigned mapped = 0;                   // the features of the page at the address, and 4
  int pages = 0, spaces = 0, mappings = 0;
};
Driver driver;

CuResult attribute(int* out, int number, int) {
  *out = number == kCuAttributeVirtualMemory ||
         (number == kCuAttributeRdmaWithVirtualMemory && (driver.promised & Driver::kRdma) != 0) ||
         (number == kCuAttributePageDescriptors && (driver.promised & Driver::kExports) != 0);
  return kCuSuccess;
}
CuResult create(PageHandle* out, std::size_t, const CuAllocationProperties* wanted, unsigned long long) {
  const unsigned features = (wanted->flags.rdma != 0 ? Driver::kRdma : 0u) |
                            (wanted->handle_types == kCuHandleFileDescriptor ? Driver::kExports : 0u);
  if ((features & ~driver.created) != 0) return kRefused;
  *out = features | 4;
  ++driver.pages;
  return kCuSuccess;
}
CuResult set_access(Address, std::size_t, const CuAccess*, std::size_t) {
  return (driver.mapped & ~driver.usable & 3) == 0 ? kCuSuccess : kRefused;
}

// Makes the table lead here. It is a variable that the product only reads.
void install() {
  CudaDriver& table = const_cast<CudaDriver&>(CudaDriver::get());
  table.missing.clear();
  table.error_name = [](CuResult, const char**) { return kRefused; };
  table.device_count = [](int* out) { return *out = 1, kCuSuccess; };
  table.device_get = [](int* out, int) { return *out = 0, kCuSuccess; };
  table.device_total = [](std::size_t* out, int) { return *out = kGiB, kCuSuccess; };
  table.device_attribute = attribute;
  table.primary_retain = [](void** out, int) { return *out = &driver, kCuSuccess; };
  table.primary_release = [](int) { return kCuSuccess; };
  table.context_current = [](void** out) { return *out = &driver, kCuSuccess; };
  table.capture_mode = [](int*) { return kCuSuccess; };
  table.page_create = create;
  table.page_release = [](PageHandle) { return --driver.pages, kCuSuccess; };
  table.address_reserve = [](Address* out, std::size_t bytes, std::size_t, Address, unsigned long long) {
    return *out = bytes, ++driver.spaces, kCuSuccess;
  };
  table.address_free = [](Address, std::size_t) { return --driver.spaces, kCuSuccess; };
  table.map = [](Address, std::size_t, std::size_t, PageHandle page, unsigned long long) {
    return driver.mapped = static_cast<unsigned>(page), ++driver.mappings, kCuSuccess;
  };
  table.unmap = [](Address, std::size_t) { return --driver.mappings, kCuSuccess; };
  table.set_access = set_access;
}

// The features of the pages that a device gets; -1: none, it has no pages.
int features(unsigned promised, unsigned created, unsigned usable) {
  driver = {promised, created, usable};
  CudaBackend device(0);
  CHECK(driver.pages == 0 && driver.spaces == 0 && driver.mappings == 0);
  CHECK(device.info().pages == device.info().no_pages.empty());
  if (!device.info().pages) return -1;
  PageHandle page = 0;
  CHECK(device.page_create(kSlotBytes, &page).ok() && device.page_release(page, kSlotBytes).ok());
  return static_cast<int>(page & 3);
}

constexpr unsigned kAll = Driver::kRdma | Driver::kExports;

}  // namespace

TEST(pages_have_the_features_that_the_system_grants) {
  install();
  CHECK(features(kAll, kAll, kAll) == static_cast<int>(kAll));
  CHECK(features(Driver::kExports, kAll, kAll) == Driver::kExports);
  CHECK(features(kAll, Driver::kExports, kAll) == Driver::kExports);
  CHECK(features(kAll, 0, kAll) == 0);
}

// WSL2 creates pages for RDMA and then refuses access to them.
TEST(a_feature_that_is_refused_after_the_page_was_created_costs_no_pages) {
  install();
  CHECK(features(kAll, kAll, Driver::kExports) == Driver::kExports);
  CHECK(features(kAll, kAll, 0) == 0);
}

TEST(without_the_features_the_system_may_refuse_all_pages) {
  install();
  const auto refuse = [](Address, std::size_t, const CuAccess*, std::size_t) { return kRefused; };
  const_cast<CudaDriver&>(CudaDriver::get()).set_access = refuse;
  CHECK(features(kAll, kAll, kAll) == -1);
  CHECK(CudaDriver::get().missing.empty());
}

TEST_MAIN()
