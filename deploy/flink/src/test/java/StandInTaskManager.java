import java.io.File;
import java.net.URL;
import java.net.URLClassLoader;
import java.util.ArrayList;
import java.util.List;
import java.util.ServiceLoader;
import java.util.Set;
import java.util.concurrent.locks.LockSupport;
import org.apache.flink.api.common.externalresource.ExternalResourceDriverFactory;
import org.apache.flink.api.common.externalresource.ExternalResourceInfo;
import org.apache.flink.configuration.Configuration;

/**
 * Treats the plugin as a task manager does, without the rest of Flink: its own class loader, the application's as the
 * thread's, one call on the main thread, an Exception is a warning, an Error ends the process.
 *
 * <p>Arguments: the plugin's jar, the amount, and {@code param} settings as {@code key=value}. It prints {@code warning:
 * ...}, or a line {@code index=..., id=...} for each device, then {@code registered}, and lives until it is killed. Its
 * orderly end takes as long as there is a file {@code unfinished}.
 */
public final class StandInTaskManager {

    public static void main(String[] arguments) throws Exception {
        URL jar = new File(arguments[0]).toURI().toURL();
        Configuration config = new Configuration();
        for (int at = 2; at < arguments.length; at++) {
            String[] setting = arguments[at].split("=", 2);
            config.setString(setting[0], setting[1]);
        }
        Runtime.getRuntime().addShutdownHook(new Thread(StandInTaskManager::finish));
        ClassLoader application = StandInTaskManager.class.getClassLoader();
        URLClassLoader plugin = new URLClassLoader(new URL[] {jar}, application);
        ExternalResourceDriverFactory factory =
                ServiceLoader.load(ExternalResourceDriverFactory.class, plugin).iterator().next();
        try {
            Set<? extends ExternalResourceInfo> infos =
                    factory.createExternalResourceDriver(config).retrieveResourceInfo(Long.parseLong(arguments[1]));
            for (ExternalResourceInfo info : infos) {
                List<String> properties = new ArrayList<>();
                for (String key : info.getKeys()) {
                    properties.add(key + "=" + info.getProperty(key).orElseThrow());
                }
                System.out.println("device: " + String.join(", ", properties));
            }
        } catch (Exception error) {
            System.out.println("warning: " + error.getMessage());
        }
        System.out.println("registered");
        Thread.sleep(Long.MAX_VALUE);
    }

    private static void finish() {
        System.out.println("ending");
        while (new File("unfinished").exists()) {
            LockSupport.parkNanos(10_000_000);
        }
    }
}
